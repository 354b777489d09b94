"""Phi-3 and Phi-4: queries, keys and values as one matrix, and gate and up as another."""

from __future__ import annotations

from llmpq.spec.families import Family
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Gated
from llmpq.spec.huggingface.sizes import Sizes

FEED_FORWARD = Gated(names=("gate_up_proj", "down_proj"), joined=True)

FAMILY = Family(
    name="phi3",
    sizes=Sizes(
        attention=SelfAttention(names=("qkv_proj", "o_proj"), bias=False),
        feed_forward=FEED_FORWARD,
        windows=windows.uniform,
    ),
)
