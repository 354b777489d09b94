"""GLM 4.7 Flash: latent attention; the first layer is dense."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import Family, MtpNames, deepseek_v2, deepseek_v3
from llmpq.spec.huggingface.feed_forward import after_first

FAMILY = Family(
    name="glm4_moe_lite",
    sizes=replace(
        deepseek_v2.SIZES, feed_forward=replace(deepseek_v3.MIXTURE, layers=after_first(default=1))
    ),
    mtp=MtpNames(),
)
