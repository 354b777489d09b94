"""Phi-3.5-MoE: experts, norms with a bias."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import Family, mixtral
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.feed_forward import RouterKind
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="phimoe",
    sizes=Sizes(
        feed_forward=replace(
            mixtral.MIXTURE,
            router="router",
            kind=RouterKind(score="sparse mixer", normalizes=False),
        ),
        windows=windows.uniform,
        norm_tensors=2,
        head_bias="lm_head_bias",
    ),
)
