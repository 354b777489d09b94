"""Qwen3-Next: linear attention in most layers, gated attention, experts."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import Family, qwen2_moe
from llmpq.spec.huggingface import mixers
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import by_step
from llmpq.spec.huggingface.sizes import Sizes

ATTENTION = SelfAttention(norm="heads", query_widths=2)

FAMILY = Family(
    name="qwen3_next",
    sizes=Sizes(
        attention=mixers.Hybrid(
            attention=ATTENTION,
            mixer=mixers.gated_delta_net(mixers.joined_inputs),
            is_attention=mixers.by_interval,
        ),
        feed_forward=replace(qwen2_moe.MIXTURE, layers=by_step),
    ),
)
