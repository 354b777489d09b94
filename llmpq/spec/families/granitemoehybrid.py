"""Granite 4: Mamba 2 in most layers, experts or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmpq.spec.families import Family, LayerForm, granite
from llmpq.spec.huggingface import mixers
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.config import Config
from llmpq.spec.huggingface.feed_forward import Experts, FeedForward, Gated
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import (
    INTERLEAVED_HEADS,
    MAMBA_NAMES,
    SOFTMAX,
    GgufForm,
    GgufMetadata,
    Join,
    attention_layers,
    has_any,
    mamba_changes,
    state_space,
)

_SHARED = Gated(
    prefix="shared_mlp",
    names=("input_linear", "output_linear"),
    activation="activation",
    joined=True,
    widths=("shared_intermediate_size",),
)
_MIXTURE = Experts(
    prefix="block_sparse_moe",
    router="router",
    widths=("intermediate_size",),
    shared_apart=True,
    dense=_SHARED,
)


def _feed_forward(fields: Config) -> Sequence[FeedForward]:
    shared = _SHARED(fields)
    if not fields.size("num_local_experts", default=0, minimum=0):
        return shared
    routed = _MIXTURE(fields)
    return [
        FeedForward(linears=one.linears + other.linears)
        for one, other in zip(routed, shared, strict=True)
    ]


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    metadata.expect("expert_gating_func", SOFTMAX)
    is_attention, kv_heads = attention_layers(metadata)
    experts = metadata.whole("expert_count", 0)
    width = metadata.whole("feed_forward_length")
    sizes = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
    rotates = metadata.flag("rope.scaling.finetuned", default=False)
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        **granite.scale_fields(metadata),
        **state_space(metadata, sizes),
        "mamba_expand": metadata.whole("ssm.inner_size") // metadata.whole("embedding_length"),
        "mamba_conv_bias": has_any(metadata, "ssm_conv1d.bias"),
        "mamba_proj_bias": has_any(metadata, "ssm_in.bias"),
        "num_key_value_heads": kv_heads,
        "layer_types": ["full_attention" if one else "linear_attention" for one in is_attention],
        "position_embedding_type": "rope" if rotates else None,
        "num_local_experts": experts,
        "num_experts_per_tok": metadata.whole("expert_used_count", 0),
        "shared_intermediate_size": metadata.whole("expert_shared_feed_forward_length", width),
    }


FAMILY = Family(
    name="granitemoehybrid",
    parts=granite.PARTS,
    form=LayerForm(rotation=None),
    block=_MIXTURE,
    sizes=Sizes(
        attention=mixers.Hybrid(
            attention=SelfAttention(),
            mixer=mixers.Mamba2(),
            is_attention=mixers.nowhere,
        ),
        feed_forward=_feed_forward,
    ),
    gguf=GgufForm(
        architecture="granitehybrid",
        fields=_fields,
        is_meant=lambda metadata: metadata.has("attention.scale"),  # Bamba has none
        names=(
            *((stored, f"mamba.{name}") for stored, name in MAMBA_NAMES),
            ("ffn_gate_inp.weight", "block_sparse_moe.router.weight"),
            ("ffn_down_shexp.weight", "shared_mlp.output_linear.weight"),
            ("ffn_down.weight", "shared_mlp.output_linear.weight"),
        ),
        experts="block_sparse_moe.experts",
        changes=(*INTERLEAVED_HEADS, *mamba_changes("mamba")),
        joins=tuple(
            Join(
                name="shared_mlp.input_linear.weight",
                parts=(f"ffn_gate{kind}.weight", f"ffn_up{kind}.weight"),
                how="in_turn",
            )
            for kind in ("_shexp", "")
        ),
    ),
)
