"""Jais 2: no gate, norms with a bias."""

from __future__ import annotations

from llmpq.spec.families import Family, nemotron

FAMILY = Family(
    name="jais2",
    sizes=nemotron.SIZES,
)
