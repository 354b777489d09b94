"""SmolLM3: Llama; every fourth layer rotates nothing."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family, LayerForm
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.feed_forward import Gated
from llmpq.spec.huggingface.sizes import Sizes


def _form(config: Any, layer: int) -> LayerForm:
    rotates = config.no_rope_layers[layer]
    return LayerForm(rotation="halves" if rotates else None)


FAMILY = Family(
    name="smollm3",
    sizes=Sizes(feed_forward=Gated(bias="mlp_bias"), windows=windows.without_positions),
    form=_form,
)
