"""GPT-J: one norm, attention and feed-forward side by side, neighbouring features rotated."""

from __future__ import annotations

from llmpq.spec.families import Family, LayerForm, ModelParts
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.config import Config
from llmpq.spec.huggingface.feed_forward import Plain
from llmpq.spec.huggingface.sizes import Sizes

ATTENTION = SelfAttention(
    prefix="attn",
    names=("k_proj", "v_proj", "q_proj", "out_proj"),
    bias=False,
    head_dim=Config.head_share,
    kv_heads=lambda fields: fields.kv_heads("n_head"),
)
SIZES = Sizes(
    attention=ATTENTION,
    feed_forward=Plain(names=("fc_in", "fc_out"), activation="act", widths=("n_inner",), bias=True),
    norms=1,
    norm_tensors=2,
    head_bias=True,
)
NORMS = ("ln_1", None, None, None)
PARTS = ModelParts(embedding="wte", final_norm="ln_f")

FAMILY = Family(
    name="gptj",
    own_modules=(("attn", "split_scores"),),
    sizes=SIZES,
    parts=PARTS,
    form=LayerForm(norms=NORMS, rotation="pairs", is_parallel=True),
)
