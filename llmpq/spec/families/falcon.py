"""Falcon: attention and feed-forward side by side or in sequence; heads in groups."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family, LayerForm, ModelParts, Norms
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.config import Config
from llmpq.spec.huggingface.feed_forward import Plain
from llmpq.spec.huggingface.sizes import Sizes


def _kv_heads(fields: Config) -> int:
    if fields.flag_or("new_decoder_architecture", default=False):
        return fields.kv_heads("num_kv_heads")
    return 1 if fields.flag_or("multi_query", default=True) else fields.size("num_attention_heads")


def _norms(fields: Config) -> int:
    if not fields.flag_or("parallel_attn", default=True):
        return 2
    is_new = fields.flag_or("new_decoder_architecture", default=False)
    return fields.size("num_ln_in_parallel_attn", default=2 if is_new else 1)


def _form(config: Any, layer: int) -> LayerForm:
    del layer
    is_new = config.new_decoder_architecture
    has_own_keys = config.num_kv_heads == config.num_attention_heads
    count = config.num_ln_in_parallel_attn
    norms: Norms = ("input_layernorm", None, None, None)
    if not config.parallel_attn:
        norms = ("input_layernorm", None, "post_attention_layernorm", None)
    elif count == 2 or (count is None and is_new):
        norms = ("ln_attn", None, "ln_mlp", None)
    return LayerForm(
        norms=norms,
        is_parallel=is_new or config.parallel_attn,
        by_heads=has_own_keys if is_new else not config.multi_query,
    )


FAMILY = Family(
    name="falcon",
    own_modules=(("self_attention", "fused_rotary"),),
    sizes=Sizes(
        attention=SelfAttention(
            prefix="self_attention",
            names=("query_key_value", "dense"),
            bias="bias",
            head_dim=Config.head_share,
            kv_heads=_kv_heads,
        ),
        feed_forward=Plain(
            names=("dense_h_to_4h", "dense_4h_to_h"),
            activation="act",
            bias="bias",
            widths=("ffn_hidden_size",),
        ),
        norms=_norms,
        norm_tensors=2,
    ),
    parts=ModelParts(embedding="word_embeddings", final_norm="ln_f"),
    form=_form,
)
