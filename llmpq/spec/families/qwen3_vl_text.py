"""The language model of Qwen3-VL: on text, Qwen3."""

from __future__ import annotations

from llmpq.spec.families import qwen3

FAMILY = qwen3.FAMILY
