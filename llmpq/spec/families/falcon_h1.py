"""Falcon-H1: attention and Mamba 2 side by side in every layer, with factors of most values."""

from __future__ import annotations

from llmpq.spec.families import Family, LayerForm, ModelParts
from llmpq.spec.huggingface import mixers
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Gated
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="falcon_h1",
    parts=ModelParts(
        final_norm="final_layernorm",
        embedding_multiplier="embedding_multiplier",
        logits_multiplier="lm_head_multiplier",
    ),
    form=LayerForm(norms=("input_layernorm", None, "pre_ff_layernorm", None)),
    recurrence_bytes=160,
    own_modules=(("mamba", "input_factors"),),
    sizes=Sizes(
        attention=mixers.Both(
            attention=SelfAttention(),
            mixer=mixers.Mamba2(
                width="mamba_d_ssm", out_bias="projectors_bias", norm_if="mamba_rms_norm"
            ),
        ),
        feed_forward=Gated(prefix="feed_forward", bias="mlp_bias"),
    ),
)
