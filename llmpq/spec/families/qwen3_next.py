"""Qwen3-Next: linear attention in most layers, gated attention, experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.spec.families import Family, MtpNames, qwen2_moe
from llmpq.spec.huggingface import mixers
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import by_step
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import (
    SHIFTED_NORMS,
    Change,
    GgufForm,
    GgufMetadata,
    Join,
    layer_count,
    partly_rotated,
)

ATTENTION = SelfAttention(norm="heads", query_widths=2)
MTP = MtpNames(
    folder="mtp.",
    layer="layers.0.",
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    projection="fc",
    final_norm="norm",
)

STATE_NAMES = (
    ("ssm_a", "linear_attn.A_log"),
    ("ssm_dt.bias", "linear_attn.dt_bias"),
    ("ssm_conv1d.weight", "linear_attn.conv1d.weight"),
    ("ssm_norm.weight", "linear_attn.norm.weight"),
    ("ssm_out.weight", "linear_attn.out_proj.weight"),
)
"""Tensors of linear attention, in a GGUF file."""
STATE_NORMS: tuple[tuple[str, tuple[Change, ...]], ...] = (
    ("linear_attn.norm.weight", ()),
    *SHIFTED_NORMS,
)


def state_fields(metadata: GgufMetadata) -> dict[str, Any]:
    """Return the fields of attention and of linear attention."""
    every = metadata.whole("full_attention_interval", 4)
    values, inner = metadata.whole("ssm.time_step_rank"), metadata.whole("ssm.inner_size")
    if every < 1:
        raise metadata.error("full_attention_interval", every, "at least 1")
    if values < 1 or inner % values:
        raise metadata.error("ssm.inner_size", inner, f"a multiple of {values} value heads")
    count, key = layer_count(metadata), "attention.recurrent_layers"
    if metadata.has(key):
        is_linear = [bool(one) for one in metadata.each(key, count)]
    else:
        is_linear = [(index + 1) % every != 0 for index in range(count)]
    kinds = ("full_attention", "linear_attention")
    return {
        **partly_rotated(metadata),
        "layer_types": [kinds[one] for one in is_linear],
        "linear_conv_kernel_dim": metadata.whole("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.whole("ssm.state_size"),
        "linear_num_key_heads": metadata.whole("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": inner // values,
    }


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    metadata.expect("expert_weights_norm", True)
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        **state_fields(metadata),
        **qwen2_moe.expert_fields(metadata),
        "norm_topk_prob": True,
    }


FAMILY = Family(
    name="qwen3_next",
    sizes=Sizes(
        attention=mixers.Hybrid(
            attention=ATTENTION,
            mixer=mixers.gated_delta_net(mixers.joined_inputs),
            is_attention=mixers.by_interval,
        ),
        feed_forward=replace(qwen2_moe.MIXTURE, layers=by_step),
    ),
    mtp=MTP,
    gguf=GgufForm(
        architecture="qwen3next",
        fields=_fields,
        names=(
            *qwen2_moe.SHARED_EXPERT,
            *STATE_NAMES,
            ("ssm_ba.weight", "linear_attn.in_proj_ba.weight"),
            ("ssm_in.weight", "linear_attn.in_proj_qkvz.weight"),  # of the first files
        ),
        joins=(
            Join(
                name="linear_attn.in_proj_qkvz.weight",
                parts=("attn_qkv.weight", "attn_gate.weight"),
                how="key_heads",
            ),
        ),
        changes=(
            ("linear_attn.A_log", ("negative_exp",)),
            ("linear_attn.conv1d.weight", ("single_channels",)),
            *qwen2_moe.SHARED_GATE,
            *STATE_NORMS,
        ),
    ),
)
