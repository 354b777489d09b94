"""Kimi Linear: linear attention whose keys decay by channel, latent attention without rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.spec.families import Family, LayerForm, deepseek_v2, deepseek_v3
from llmpq.spec.huggingface import mixers
from llmpq.spec.huggingface.attention import LatentAttention
from llmpq.spec.huggingface.feed_forward import after_first
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import (
    SIGMOID,
    GgufForm,
    GgufMetadata,
    Join,
    attention_layers,
    routed_experts,
)

_STATE_NAMES = (
    ("ssm_a", "forget_gate.A_log"),
    ("ssm_dt.bias", "forget_gate.dt_bias"),
    ("ssm_f_a.weight", "forget_gate.f_a_proj.weight"),
    ("ssm_f_b.weight", "forget_gate.f_b_proj.weight"),
    ("ssm_beta.weight", "b_proj.weight"),
    ("ssm_g_a.weight", "g_a_proj.weight"),
    ("ssm_g_b.weight", "g_b_proj.weight"),
    ("ssm_norm.weight", "o_norm.weight"),
)
"""Tensors of linear attention, in a GGUF file."""


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    metadata.expect("expert_gating_func", SIGMOID)
    is_attention, _ = attention_layers(metadata)
    heads = metadata.whole("attention.head_count")
    metadata.whole("attention.value_length", 0)  # of no head: it is that of value_length_mla
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "num_key_value_heads": heads,
        **deepseek_v2.latent_sizes(metadata, is_joint=True),
        "linear_num_heads": heads,
        "linear_head_dim": metadata.whole("kda.head_dim"),
        "linear_conv_kernel_dim": metadata.whole("ssm.conv_kernel"),
        "layer_types": ["full_attention" if one else "linear_attention" for one in is_attention],
        **routed_experts(metadata, "num_experts"),
        "num_shared_experts": metadata.whole("expert_shared_count", 0),
        "first_k_dense_replace": metadata.whole("leading_dense_block_count", 0),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "moe_renormalize": metadata.flag("expert_weights_norm", default=True),
        "num_expert_group": metadata.whole("expert_group_count", 1),
        "topk_group": metadata.whole("expert_group_used_count", 1),
    }


FAMILY = Family(
    name="kimi_linear",
    form=LayerForm(rotation=None),
    recurrence_bytes=860,
    sizes=Sizes(
        attention=mixers.Hybrid(
            attention=LatentAttention(),
            mixer=mixers.delta_attention,
            is_attention=mixers.by_delta_list,
        ),
        feed_forward=replace(
            deepseek_v3.MIXTURE, layers=after_first("first_k_dense_replace", default=1)
        ),
    ),
    gguf=GgufForm(
        architecture="kimi-linear",
        fields=_fields,
        names=(
            *((stored, f"self_attn.{name}") for stored, name in _STATE_NAMES),
            *deepseek_v2.NAMES,
        ),
        changes=(("forget_gate.A_log", ("negative_exp", "single_heads")),),
        joins=(
            *deepseek_v2.JOINS,
            Join(
                name="self_attn.conv1d.weight",
                parts=("ssm_conv1d_q.weight", "ssm_conv1d_k.weight", "ssm_conv1d_v.weight"),
                how="channels",
            ),
        ),
    ),
)
