"""MiniCPM 3: latent attention, a dense feed-forward, scales."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import Family, ModelParts, deepseek_v2
from llmpq.spec.huggingface.feed_forward import Gated

FAMILY = Family(
    name="minicpm3",
    sizes=replace(deepseek_v2.SIZES, feed_forward=Gated()),
    parts=ModelParts(logits_divisor="logits_scaling", applied_scales=("scale_emb",)),
)
