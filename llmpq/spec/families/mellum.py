"""Mellum: normed queries and keys, experts, windows where the file says."""

from __future__ import annotations

from llmpq.spec.families import Family
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Experts, RouterKind, after_first
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="mellum",
    sizes=Sizes(
        attention=SelfAttention(norm="heads"),
        feed_forward=Experts(kind=RouterKind(normalizes="norm_topk_prob"), layers=after_first()),
        windows=windows.named,
    ),
)
