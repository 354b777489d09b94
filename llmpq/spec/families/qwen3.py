"""Qwen3: normed queries and keys, windows from a layer on."""

from __future__ import annotations

from llmpq.spec.families import Family
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="qwen3",
    sizes=Sizes(attention=SelfAttention(norm="heads"), windows=windows.from_layer),
)
