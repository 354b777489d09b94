"""Qwen2-MoE: experts beside one whose output a gate weighs."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import Family
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Experts, RouterKind, by_step
from llmpq.spec.huggingface.sizes import Sizes

MIXTURE = Experts(
    kind=RouterKind(normalizes="norm_topk_prob"),
    shared="shared_expert",
    shared_gate=True,
    shared_width=lambda fields: fields.size("shared_expert_intermediate_size"),
)

FAMILY = Family(
    name="qwen2_moe",
    sizes=Sizes(
        attention=SelfAttention(bias="qkv_bias", out_bias=False),
        feed_forward=replace(MIXTURE, layers=by_step),
        windows=windows.every_other,
    ),
)
