"""Arcee (AFM): Llama without a gate."""

from __future__ import annotations

from llmpq.spec.families import Family
from llmpq.spec.huggingface.feed_forward import Plain
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="arcee",
    sizes=Sizes(feed_forward=Plain(bias="mlp_bias")),
)
