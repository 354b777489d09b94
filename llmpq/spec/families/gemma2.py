"""Gemma 2: four norms, windows in every other layer, bounded scores."""

from __future__ import annotations

from llmpq.spec.families import Family
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.sizes import Sizes

SIZES = Sizes(norms=4, windows=windows.by_period(2))

FAMILY = Family(
    name="gemma2",
    sizes=SIZES,
    writes_scores=True,
)
