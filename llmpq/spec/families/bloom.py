"""BLOOM: ALiBi in place of rotated positions; query, key and value head by head."""

from __future__ import annotations

from llmpq.spec.families import Alibi, Family, LayerForm, ModelParts
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.config import Config
from llmpq.spec.huggingface.feed_forward import Plain
from llmpq.spec.huggingface.sizes import Sizes, unlimited

FAMILY = Family(
    name="bloom",
    own_modules=(("self_attention", "alibi"),),
    sizes=Sizes(
        attention=SelfAttention(
            prefix="self_attention",
            names=("query_key_value", "dense"),
            bias=True,
            head_dim=Config.head_share,
            kv_heads=lambda fields: fields.kv_heads("n_head"),
        ),
        feed_forward=Plain(
            names=("dense_h_to_4h", "dense_4h_to_h"),
            activation="gelu_impl",
            bias=True,
            widths=("n_inner",),
        ),
        norm_tensors=2,
        embedding_norms=1,
        max_positions=unlimited,
    ),
    parts=ModelParts(
        embedding="word_embeddings", embedding_norm="word_embeddings_layernorm", final_norm="ln_f"
    ),
    alibi=Alibi(),
    has_formula=True,
    form=LayerForm(rotation=None, by_heads=True),
)
