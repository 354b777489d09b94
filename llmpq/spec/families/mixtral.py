"""Mixtral: Mistral with experts."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import Family, mistral
from llmpq.spec.huggingface.feed_forward import Experts

MIXTURE = Experts(widths=("intermediate_size",))

FAMILY = Family(
    name="mixtral",
    sizes=replace(mistral.SIZES, feed_forward=MIXTURE),
)
