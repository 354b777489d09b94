"""GLM 4.5: experts beside shared ones."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import Family, deepseek_v3, glm
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="glm4_moe",
    sizes=Sizes(
        attention=replace(glm.ATTENTION, norm="heads", norm_if="use_qk_norm"),
        feed_forward=deepseek_v3.MIXTURE,
    ),
)
