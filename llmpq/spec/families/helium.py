"""Helium: Llama with neighbouring features rotated."""

from __future__ import annotations

from llmpq.spec.families import Family, LayerForm
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Gated
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="helium",
    sizes=Sizes(attention=SelfAttention(out_bias=False), feed_forward=Gated(bias="mlp_bias")),
    form=LayerForm(rotation="pairs"),
)
