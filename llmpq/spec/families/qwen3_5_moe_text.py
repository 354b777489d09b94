"""Qwen3.5 with experts."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import Family, qwen2_moe, qwen3_5_text

FAMILY = Family(
    name="qwen3_5_moe_text",
    sizes=replace(qwen3_5_text.SIZES, feed_forward=qwen2_moe.MIXTURE),
)
