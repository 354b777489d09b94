"""Granite: Llama with scales."""

from __future__ import annotations

from llmpq.spec.families import Family
from llmpq.spec.huggingface.feed_forward import Gated
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="granite",
    sizes=Sizes(feed_forward=Gated(bias="mlp_bias")),
)
