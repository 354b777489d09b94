"""ERNIE 4.5: Llama with neighbouring features rotated."""

from __future__ import annotations

from llmpq.spec.families import Family, LayerForm
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Gated
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="ernie4_5",
    sizes=Sizes(attention=SelfAttention(bias="use_bias"), feed_forward=Gated(bias="use_bias")),
    form=LayerForm(rotation="pairs"),
)
