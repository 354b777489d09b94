"""IQuest-Coder: the sizes of Llama."""

from __future__ import annotations

from llmpq.spec.families import Family, llama

FAMILY = Family(
    name="iquestcoder",
    sizes=llama.SIZES,
)
