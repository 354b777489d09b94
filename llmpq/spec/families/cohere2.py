"""Cohere 2 (Command A): Cohere with windows; layers without one rotate nothing."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import Family, ModelParts, cohere
from llmpq.spec.huggingface import windows

FAMILY = Family(
    name="cohere2",
    sizes=replace(cohere.SIZES, windows=windows.by_period(4, "sliding_window_pattern")),
    parts=ModelParts(logits_multiplier="logit_scale"),
)
