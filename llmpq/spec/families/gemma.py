"""Gemma: norms that multiply by 1 + weight, scaled embeddings."""

from __future__ import annotations

from llmpq.spec.families import Family
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="gemma",
    sizes=Sizes(),
)
