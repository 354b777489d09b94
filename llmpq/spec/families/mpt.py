"""MPT: ALiBi, queries, keys and values as one matrix."""

from __future__ import annotations

from llmpq.spec.families import Alibi, Family, LayerForm, ModelParts
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.config import Config
from llmpq.spec.huggingface.feed_forward import Plain
from llmpq.spec.huggingface.sizes import Sizes, unlimited

FAMILY = Family(
    name="mpt",
    own_modules=(("attn", "position_bias"),),
    sizes=Sizes(
        attention=SelfAttention(
            prefix="attn",
            names=("Wqkv", "out_proj"),
            bias=False,
            head_dim=Config.head_share,
            kv_heads=lambda fields: fields.kv_heads("n_heads"),
        ),
        feed_forward=Plain(prefix="ffn", activation="act", widths=("inner_size",)),
        max_positions=unlimited,
    ),
    parts=ModelParts(embedding="wte", final_norm="norm_f"),
    alibi=Alibi(argument="position_bias", largest="attn_config.alibi_bias_max"),
    form=LayerForm(norms=("norm_1", None, "norm_2", None), rotation=None),
)
