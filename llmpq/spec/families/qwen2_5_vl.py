"""Qwen2.5-VL: on text, Qwen2."""

from __future__ import annotations

from llmpq.spec.families import qwen2

FAMILY = qwen2.FAMILY
