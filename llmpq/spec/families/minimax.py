"""MiniMax-01: lightning attention in most layers, experts, factors of residuals."""

from __future__ import annotations

from llmpq.spec.families import Family, mixtral
from llmpq.spec.huggingface import mixers
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="minimax",
    recurrence_bytes=32,
    own_modules=(("self_attn", "decays"),),
    sizes=Sizes(
        attention=mixers.Hybrid(
            attention=SelfAttention(bias=False),
            mixer=mixers.lightning_attention,
            is_attention=mixers.every_other,
        ),
        feed_forward=mixtral.MIXTURE,
    ),
)
