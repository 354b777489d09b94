"""Llama: the default of every field."""

from __future__ import annotations

from llmpq.spec.families import Family
from llmpq.spec.huggingface.feed_forward import Gated
from llmpq.spec.huggingface.sizes import Sizes

SIZES = Sizes(feed_forward=Gated(bias="mlp_bias"))

FAMILY = Family(
    name="llama",
    sizes=SIZES,
)
