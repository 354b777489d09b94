"""Kimi Linear: linear attention whose keys decay by channel, latent attention without rotation."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import Family, LayerForm, deepseek_v3
from llmpq.spec.huggingface import mixers
from llmpq.spec.huggingface.attention import LatentAttention
from llmpq.spec.huggingface.feed_forward import after_first
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="kimi_linear",
    form=LayerForm(rotation=None),
    sizes=Sizes(
        attention=mixers.Hybrid(
            attention=LatentAttention(),
            mixer=mixers.delta_attention,
            is_attention=mixers.by_delta_list,
        ),
        feed_forward=replace(
            deepseek_v3.MIXTURE, layers=after_first("first_k_dense_replace", default=1)
        ),
    ),
)
