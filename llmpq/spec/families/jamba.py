"""Jamba: Mamba 1 in most layers, attention without positions in the others, experts in some."""

from __future__ import annotations

from llmpq.spec.families import Family, LayerForm, ModelParts
from llmpq.spec.huggingface import mixers
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Experts, Gated, RouterKind, by_period
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="jamba",
    parts=ModelParts(final_norm="final_layernorm"),
    form=LayerForm(norms=("input_layernorm", None, "pre_ff_layernorm", None), rotation=None),
    has_layer_classes=True,
    sizes=Sizes(
        attention=mixers.Hybrid(
            attention=SelfAttention(bias=False),
            mixer=mixers.Mamba1(norms=True),
            is_attention=mixers.by_period,
        ),
        feed_forward=Experts(
            prefix="feed_forward",
            router="router",
            kind=RouterKind(normalizes=False),
            widths=("intermediate_size",),
            layers=by_period,
            dense=Gated(prefix="feed_forward"),
        ),
    ),
)
