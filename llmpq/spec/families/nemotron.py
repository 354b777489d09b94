"""Nemotron: no gate, norms with a bias."""

from __future__ import annotations

from llmpq.spec.families import Family
from llmpq.spec.huggingface.feed_forward import Plain
from llmpq.spec.huggingface.sizes import Sizes

SIZES = Sizes(feed_forward=Plain(bias="mlp_bias"), norm_tensors=2)

FAMILY = Family(
    name="nemotron",
    sizes=SIZES,
)
