"""Qwen3.5: linear attention with four inputs in most layers."""

from __future__ import annotations

from llmpq.spec.families import Family, qwen3_next
from llmpq.spec.huggingface import mixers
from llmpq.spec.huggingface.sizes import Sizes

SIZES = Sizes(
    attention=mixers.Hybrid(
        attention=qwen3_next.ATTENTION,
        mixer=mixers.gated_delta_net(mixers.separate_inputs),
        is_attention=mixers.by_interval,
    ),
)

FAMILY = Family(
    name="qwen3_5_text",
    sizes=SIZES,
)
