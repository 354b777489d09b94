"""Youtu-LLM: latent attention and a dense feed-forward."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import Family, deepseek_v2
from llmpq.spec.huggingface.feed_forward import Gated

FAMILY = Family(
    name="youtu",
    sizes=replace(deepseek_v2.SIZES, feed_forward=Gated()),
)
