"""Hunyuan 3: normed queries and keys, experts after a dense layer."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import Family, deepseek_v2
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import RouterKind, after_first
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="hy_v3",
    sizes=Sizes(
        attention=SelfAttention(norm="heads"),
        feed_forward=replace(
            deepseek_v2.MIXTURE, kind=RouterKind(score="sigmoid"), layers=after_first(default=1)
        ),
    ),
)
