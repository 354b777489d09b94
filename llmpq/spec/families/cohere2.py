"""Cohere 2 (Command A): Cohere with windows; layers without one rotate nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.spec.families import Family, LayerForm, ModelParts, cohere
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.windows import SLIDING


def _form(config: Any, layer: int) -> LayerForm:
    rotates = config.layer_types[layer] == SLIDING and config.sliding_window is not None
    return LayerForm(norms=cohere.NORMS, rotation="pairs" if rotates else None, is_parallel=True)


FAMILY = Family(
    name="cohere2",
    sizes=replace(cohere.SIZES, windows=windows.by_period(4, "sliding_window_pattern")),
    parts=ModelParts(logits_multiplier="logit_scale"),
    form=_form,
)
