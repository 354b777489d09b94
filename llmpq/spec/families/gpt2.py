"""GPT-2: learned positions, norms with a bias, queries, keys and values as one matrix."""

from __future__ import annotations

from llmpq.spec.families import Family, LayerForm, ModelParts
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.config import Config
from llmpq.spec.huggingface.feed_forward import Plain
from llmpq.spec.huggingface.sizes import Sizes

ATTENTION = SelfAttention(
    prefix="attn",
    names=("c_attn", "c_proj"),
    bias=True,
    head_dim=Config.head_share,
    kv_heads=lambda fields: fields.kv_heads("n_head"),
)
SIZES = Sizes(
    attention=ATTENTION,
    feed_forward=Plain(names=("c_fc", "c_proj"), activation="act", widths=("n_inner",), bias=True),
    norm_tensors=2,
    positions=0,
)
NORMS = ("ln_1", None, "ln_2", None)
PARTS = ModelParts(embedding="wte", positions="wpe", final_norm="ln_f")

FAMILY = Family(
    name="gpt2",
    sizes=SIZES,
    parts=PARTS,
    form=LayerForm(norms=NORMS, rotation=None),
)
