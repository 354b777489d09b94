"""Granite: Llama with scales."""

from __future__ import annotations

from llmpq.spec.families import Family, ModelParts
from llmpq.spec.huggingface.feed_forward import Gated
from llmpq.spec.huggingface.sizes import Sizes

PARTS = ModelParts(embedding_multiplier="embedding_multiplier", logits_divisor="logits_scaling")

FAMILY = Family(
    name="granite",
    sizes=Sizes(feed_forward=Gated(bias="mlp_bias")),
    parts=PARTS,
)
