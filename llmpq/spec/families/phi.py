"""Phi: one norm, attention and feed-forward side by side."""

from __future__ import annotations

from llmpq.spec.families import Family, LayerForm, ModelParts
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Plain
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="phi",
    sizes=Sizes(
        attention=SelfAttention(
            names=("q_proj", "k_proj", "v_proj", "dense"),
            bias=True,
            norm="heads",
            norm_names=("q_layernorm", "k_layernorm"),
            norm_tensors=2,
            norm_if="qk_layernorm",
        ),
        feed_forward=Plain(names=("fc1", "fc2"), activation="activation_fn", bias=True),
        norms=1,
        norm_tensors=2,
        head_bias=True,
    ),
    parts=ModelParts(final_norm="final_layernorm"),
    has_formula=True,
    form=LayerForm(norms=("input_layernorm", None, None, None), is_parallel=True),
)
