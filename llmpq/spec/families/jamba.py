"""Jamba: Mamba 1 in most layers, attention without positions in the others, experts in some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmpq.errors import SpecError
from llmpq.spec.families import Family, LayerForm, ModelParts
from llmpq.spec.huggingface import mixers
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Experts, Gated, RouterKind, by_period
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import (
    FEED_FORWARD_NAMES,
    MAMBA1_NAMES,
    GgufForm,
    GgufMetadata,
    attention_layers,
    has_any,
    head_size,
    mamba1_changes,
)


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    is_attention, kv_heads = attention_layers(metadata)
    tensors = metadata.header.tensors
    has_experts = [f"blk.{i}.ffn_gate_inp.weight" in tensors for i in range(len(is_attention))]
    head_size(metadata)  # an equal share of the width
    return {
        "architectures": ["JambaForCausalLM"],
        **_period(metadata, "attn_layer", is_attention),
        **_period(metadata, "expert_layer", has_experts),
        "num_key_value_heads": kv_heads,
        "head_dim": ...,
        "rope_parameters": ...,
        "num_experts": metadata.whole("expert_count", 1) if any(has_experts) else 1,
        "num_experts_per_tok": metadata.whole("expert_used_count", 1),
        "mamba_d_state": metadata.whole("ssm.state_size"),
        "mamba_d_conv": metadata.whole("ssm.conv_kernel"),
        "mamba_expand": metadata.whole("ssm.inner_size") // metadata.whole("embedding_length"),
        "mamba_dt_rank": metadata.whole("ssm.time_step_rank"),
        "mamba_conv_bias": has_any(metadata, "ssm_conv1d.bias"),
        "mamba_proj_bias": has_any(metadata, "ssm_in.bias"),
    }


def _period(metadata: GgufMetadata, prefix: str, chosen: Sequence[bool]) -> dict[str, int]:
    """Return the period and the first of the layers that are chosen.

    Raises:
        SpecError: they have no period.
    """
    places = [index for index, one in enumerate(chosen) if one]
    if not places:  # a period that no layer reaches
        return {f"{prefix}_period": len(chosen) + 1, f"{prefix}_offset": len(chosen)}
    first, second = (*places, len(chosen) + places[0])[:2]
    every = second - first
    if places != list(range(first, len(chosen), every)) or first >= every:
        path, kind = metadata.header.path, prefix.removesuffix("_layer")
        raise SpecError(
            f"{path}: found '{kind}' in layers {places}, expected a fixed number of layers apart"
        )
    return {f"{prefix}_period": every, f"{prefix}_offset": first}


FAMILY = Family(
    name="jamba",
    parts=ModelParts(final_norm="final_layernorm"),
    form=LayerForm(norms=("input_layernorm", None, "pre_ff_layernorm", None), rotation=None),
    has_layer_classes=True,
    sizes=Sizes(
        attention=mixers.Hybrid(
            attention=SelfAttention(bias=False),
            mixer=mixers.Mamba1(norms=True),
            is_attention=mixers.by_period,
        ),
        feed_forward=Experts(
            prefix="feed_forward",
            router="router",
            kind=RouterKind(normalizes=False),
            widths=("intermediate_size",),
            layers=by_period,
            dense=Gated(prefix="feed_forward"),
        ),
    ),
    gguf=GgufForm(
        architecture="jamba",
        fields=_fields,
        names=(
            *((stored, f"mamba.{name}") for stored, name in MAMBA1_NAMES),
            *(
                (f"ssm_{one}_norm.weight", f"mamba.{one}_layernorm.weight")
                for one in ("dt", "b", "c")
            ),
            ("ffn_norm.weight", "pre_ff_layernorm.weight"),
            ("ffn_gate_inp.weight", "feed_forward.router.weight"),
            *FEED_FORWARD_NAMES,
        ),
        other_names=(("output_norm.weight", "model.final_layernorm.weight"),),
        experts="feed_forward.experts",
        changes=mamba1_changes("mamba"),
    ),
)
