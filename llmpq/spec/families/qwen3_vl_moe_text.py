"""The language model of Qwen3-VL with experts: on text, Qwen3-MoE."""

from __future__ import annotations

from llmpq.spec.families import qwen3_moe

FAMILY = qwen3_moe.FAMILY
