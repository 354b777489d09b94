"""Gemma 3: Gemma 2 with normed queries and keys; layers with windows have their own rotation."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import Family, gemma2
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.attention import SelfAttention

FAMILY = Family(
    name="gemma3_text",
    sizes=replace(
        gemma2.SIZES,
        attention=SelfAttention(norm="heads"),
        windows=windows.by_period(6, "sliding_window_pattern"),
    ),
)
