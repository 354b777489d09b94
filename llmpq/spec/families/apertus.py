"""Apertus: normed queries and keys, an activation with two parameters and no gate."""

from __future__ import annotations

from llmpq.spec.families import Family, LayerForm
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Plain
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="apertus",
    sizes=Sizes(attention=SelfAttention(norm="heads"), feed_forward=Plain(others=2)),
    form=LayerForm(norms=("attention_layernorm", None, "feedforward_layernorm", None)),
)
