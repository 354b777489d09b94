"""Falcon-H1: attention and Mamba 2 side by side in every layer, with factors of most values."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family, LayerForm, ModelParts
from llmpq.spec.huggingface import mixers
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Gated
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import (
    FEED_FORWARD_NAMES,
    MAMBA_NAMES,
    GgufForm,
    GgufMetadata,
    has_bias,
    mamba_changes,
    state_space,
)


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    """Return the fields of a file; its weights have been multiplied by the factors."""
    names = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
    return {
        "architectures": ["FalconH1ForCausalLM"],
        **state_space(metadata, names),
        "mamba_d_ssm": metadata.whole("ssm.inner_size"),
        "mamba_rms_norm": metadata.has_tensor("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "mamba_conv_bias": has_bias(metadata, "ssm_conv1d"),
        "mamba_proj_bias": has_bias(metadata, "ssm_in"),
        "projectors_bias": has_bias(metadata, "ssm_out"),
        "attention_bias": has_bias(metadata, "attn_q"),
        "mlp_bias": has_bias(metadata, "ffn_up"),
    }


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
    gguf=GgufForm(
        architecture="falcon-h1",
        fields=_fields,
        names=(
            *((stored, f"mamba.{name}") for stored, name in MAMBA_NAMES),
            ("ffn_norm", "pre_ff_layernorm.weight"),
            ("ffn_norm.weight", "pre_ff_layernorm.weight"),
            *FEED_FORWARD_NAMES,
        ),
        other_names=(("output_norm.weight", "model.final_layernorm.weight"),),
        changes=mamba_changes("mamba"),
    ),
)
