"""Qwen2 and Qwen2.5: queries, keys and values with a bias, windows from a layer on."""

from __future__ import annotations

from llmpq.spec.families import Family
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="qwen2",
    sizes=Sizes(attention=SelfAttention(bias=True, out_bias=False), windows=windows.from_layer),
)
