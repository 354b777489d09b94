"""Persimmon: query, key and value head by head, no gate."""

from __future__ import annotations

from llmpq.spec.families import Family, LayerForm, ModelParts
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.config import Config
from llmpq.spec.huggingface.feed_forward import Plain
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="persimmon",
    sizes=Sizes(
        attention=SelfAttention(
            names=("query_key_value", "dense"),
            bias=True,
            norm="heads",
            norm_names=("q_layernorm", "k_layernorm"),
            norm_tensors=2,
            norm_if="qk_layernorm",
            head_dim=Config.head_share,
            kv_heads=lambda fields: fields.size("num_attention_heads"),
        ),
        feed_forward=Plain(names=("dense_h_to_4h", "dense_4h_to_h"), activation="act", bias=True),
        norm_tensors=2,
    ),
    parts=ModelParts(final_norm="final_layernorm"),
    form=LayerForm(by_heads=True),
)
