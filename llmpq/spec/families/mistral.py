"""Mistral: Llama without biases, with windows."""

from __future__ import annotations

from llmpq.spec.families import Family
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.sizes import Sizes

SIZES = Sizes(attention=SelfAttention(bias=False), windows=windows.uniform)

FAMILY = Family(
    name="mistral",
    sizes=SIZES,
)
