"""FlexOlmo: OLMo 2 with experts."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import Family, olmo2, olmoe

FAMILY = Family(
    name="flex_olmo",
    sizes=replace(olmo2.SIZES, feed_forward=olmoe.MIXTURE),
    form=olmo2.FORM,
)
