"""dots.llm1: normed queries and keys, experts beside shared ones, windows from a layer on."""

from __future__ import annotations

from llmpq.spec.families import Family, deepseek_v3
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="dots1",
    sizes=Sizes(
        attention=SelfAttention(norm="heads"),
        feed_forward=deepseek_v3.MIXTURE,
        windows=windows.always_from_layer,
    ),
)
