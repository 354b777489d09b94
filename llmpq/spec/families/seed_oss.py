"""Seed-OSS: Llama with a bias of the attention's output apart."""

from __future__ import annotations

from llmpq.spec.families import Family
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Gated
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="seed_oss",
    sizes=Sizes(
        attention=SelfAttention(out_bias="attention_out_bias"),
        feed_forward=Gated(bias="mlp_bias"),
    ),
)
