"""EXAONE 4: late norms; beside layers with a window, others rotate nothing."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family, LayerForm, olmo2
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.huggingface.windows import SLIDING


def rotates(config: Any, layer: int) -> bool:
    """Return whether a layer rotates: beside layers with a window, others rotate nothing."""
    return bool(config.sliding_window is None or config.layer_types[layer] == SLIDING)


def _form(config: Any, layer: int) -> LayerForm:
    return LayerForm(norms=olmo2.FORM.norms, rotation="halves" if rotates(config, layer) else None)


FAMILY = Family(
    name="exaone4",
    sizes=Sizes(
        attention=SelfAttention(bias=False, norm="heads"),
        windows=windows.by_period(4, "sliding_window_pattern"),
    ),
    form=_form,
)
