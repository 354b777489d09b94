"""Ling 3.0: Kimi's linear attention with bounded gates, latent attention with a gate a head."""

from __future__ import annotations

from llmpq.spec.families import Family, deepseek_v3
from llmpq.spec.huggingface import mixers
from llmpq.spec.huggingface.attention import LatentAttention
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="bailing_hybrid",
    recurrence_bytes=1650,
    sizes=Sizes(
        attention=mixers.Hybrid(
            attention=LatentAttention(gate="g_proj"),
            mixer=mixers.safe_delta_attention,
            is_attention=mixers.by_group,
        ),
        feed_forward=deepseek_v3.MIXTURE,
    ),
)
