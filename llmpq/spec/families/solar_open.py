"""Solar Open: experts in all layers."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import Family, deepseek_v3
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="solar_open",
    sizes=Sizes(feed_forward=replace(deepseek_v3.MIXTURE, layers=None)),
)
