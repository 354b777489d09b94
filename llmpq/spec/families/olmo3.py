"""OLMo 3: OLMo 2 with windows."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import Family, olmo2
from llmpq.spec.huggingface import windows

FAMILY = Family(
    name="olmo3",
    sizes=replace(olmo2.SIZES, windows=windows.by_period(4)),
    form=olmo2.FORM,
)
