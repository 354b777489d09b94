"""EXAONE 4: late norms; beside layers with a window, others rotate nothing."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family, LayerForm
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.huggingface.windows import SLIDING


def form(config: Any, layer: int) -> LayerForm:
    """Return the form of a layer: beside layers with a window, others rotate nothing."""
    rotates = config.sliding_window is None or config.layer_types[layer] == SLIDING
    return LayerForm(rotation="halves" if rotates else None)


FAMILY = Family(
    name="exaone4",
    sizes=Sizes(
        attention=SelfAttention(bias=False, norm="heads"),
        windows=windows.by_period(4, "sliding_window_pattern"),
    ),
    form=form,
)
