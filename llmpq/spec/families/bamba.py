"""Bamba: Mamba 2 in most layers, attention with half of each head rotated in the others."""

from __future__ import annotations

from llmpq.spec.families import Family, LayerForm, ModelParts
from llmpq.spec.huggingface import mixers
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Gated
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="bamba",
    parts=ModelParts(final_norm="final_layernorm"),
    form=LayerForm(norms=("input_layernorm", None, "pre_ff_layernorm", None)),
    sizes=Sizes(
        attention=mixers.Hybrid(
            attention=SelfAttention(),
            mixer=mixers.Mamba2(),
            is_attention=mixers.by_indices,
        ),
        feed_forward=Gated(prefix="feed_forward", bias="mlp_bias"),
    ),
)
