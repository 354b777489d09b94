"""Bamba: Mamba 2 in most layers, attention with half of each head rotated in the others."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family, LayerForm, ModelParts
from llmpq.spec.huggingface import mixers
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Gated
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import (
    FEED_FORWARD_NAMES,
    INTERLEAVED_HEADS,
    MAMBA_NAMES,
    GgufForm,
    GgufMetadata,
    attention_layers,
    has_any,
    mamba_changes,
    partly_rotated,
    state_space,
)


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    metadata.expect("rope.scaling.finetuned", True)  # whether positions are rotated
    is_attention, kv_heads = attention_layers(metadata)
    names = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
    return {
        "architectures": ["BambaForCausalLM"],
        **partly_rotated(metadata),
        **state_space(metadata, names),
        "mamba_expand": metadata.whole("ssm.inner_size") // metadata.whole("embedding_length"),
        "mamba_conv_bias": has_any(metadata, "ssm_conv1d.bias"),
        "mamba_proj_bias": has_any(metadata, "ssm_in.bias"),
        "attention_bias": has_any(metadata, "attn_q.bias"),
        "mlp_bias": has_any(metadata, "ffn_up.bias"),
        "num_key_value_heads": kv_heads,
        "attn_layer_indices": [index for index, one in enumerate(is_attention) if one],
    }


FAMILY = Family(
    name="bamba",
    parts=ModelParts(final_norm="final_layernorm"),
    form=LayerForm(norms=("input_layernorm", None, "pre_ff_layernorm", None)),
    sizes=Sizes(
        attention=mixers.Hybrid(
            attention=SelfAttention(),
            mixer=mixers.Mamba2(),
            is_attention=mixers.by_indices,
        ),
        feed_forward=Gated(prefix="feed_forward", bias="mlp_bias"),
    ),
    gguf=GgufForm(
        architecture="granitehybrid",
        fields=_fields,
        is_meant=lambda metadata: not metadata.has("attention.scale"),
        names=(
            *((stored, f"mamba.{name}") for stored, name in MAMBA_NAMES),
            ("ffn_norm.weight", "pre_ff_layernorm.weight"),
            *FEED_FORWARD_NAMES,
        ),
        other_names=(("output_norm.weight", "model.final_layernorm.weight"),),
        changes=(*INTERLEAVED_HEADS, *mamba_changes("mamba")),
    ),
)
