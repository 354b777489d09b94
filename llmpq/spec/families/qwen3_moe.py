"""Qwen3-MoE: normed queries and keys, experts."""

from __future__ import annotations

from llmpq.spec.families import Family
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Experts, by_step
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="qwen3_moe",
    sizes=Sizes(
        attention=SelfAttention(norm="heads"),
        feed_forward=Experts(layers=by_step),
        windows=windows.if_used,
    ),
)
