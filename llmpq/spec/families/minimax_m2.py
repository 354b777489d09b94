"""MiniMax-M2: experts, queries and keys normed over all heads."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import Family, mixtral
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import RouterKind
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="minimax_m2",
    sizes=Sizes(
        attention=SelfAttention(norm="rows", bias=False),
        feed_forward=replace(mixtral.MIXTURE, kind=RouterKind(score="sigmoid")),
    ),
)
