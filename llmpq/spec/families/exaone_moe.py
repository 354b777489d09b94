"""EXAONE with experts: Llama's norms, and normed queries and keys."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family, LayerForm, deepseek_v3, exaone4
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.sizes import Sizes


def _form(config: Any, layer: int) -> LayerForm:
    return LayerForm(rotation="halves" if exaone4.rotates(config, layer) else None)


FAMILY = Family(
    name="exaone_moe",
    sizes=Sizes(
        attention=SelfAttention(bias=False, norm="heads"),
        feed_forward=deepseek_v3.MIXTURE,
        windows=windows.by_period(4, "sliding_window_pattern"),
    ),
    form=_form,
)
