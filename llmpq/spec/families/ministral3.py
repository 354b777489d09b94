"""Ministral 3: Mistral, with queries scaled at far positions."""

from __future__ import annotations

from llmpq.spec.families import Family, mistral

FAMILY = Family(
    name="ministral3",
    sizes=mistral.SIZES,
)
