"""DeepSeek-V2: latent attention, and experts beside shared ones."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family
from llmpq.spec.huggingface.attention import LatentAttention
from llmpq.spec.huggingface.feed_forward import Experts, RouterKind, after_first
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import (
    SIGMOID,
    SOFTMAX,
    GgufForm,
    GgufMetadata,
    Join,
    has_experts,
    rotation,
    routed_experts,
)

MIXTURE = Experts(
    kind=RouterKind(normalizes=False),
    shared="shared_experts",
    layers=after_first("first_k_dense_replace"),
)
SIZES = Sizes(attention=LatentAttention(), feed_forward=MIXTURE)

EXPERT_NAMES = (
    ("ffn_gate_shexp.weight", "mlp.shared_experts.gate_proj.weight"),
    ("ffn_up_shexp.weight", "mlp.shared_experts.up_proj.weight"),
    ("ffn_down_shexp.weight", "mlp.shared_experts.down_proj.weight"),
    ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
    ("exp_probs_b", "mlp.gate.e_score_correction_bias"),
)
"""Tensors beside the experts, in a GGUF file."""
NAMES = (
    ("attn_q_a.weight", "self_attn.q_a_proj.weight"),
    ("attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight"),
    ("attn_q_b.weight", "self_attn.q_b_proj.weight"),
    ("attn_kv_a_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    ("attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight"),
    ("attn_kv_b.weight", "self_attn.kv_b_proj.weight"),  # of older files
    *EXPERT_NAMES,
)
JOINS = (
    Join(
        name="self_attn.kv_b_proj.weight",
        parts=("attn_k_b.weight", "attn_v_b.weight"),
        how="latent",
    ),
)


def shared_experts(metadata: GgufMetadata) -> dict[str, Any]:
    """Return the fields of experts with some for all tokens, behind layers without."""
    return {
        **routed_experts(metadata, "n_routed_experts"),
        "n_shared_experts": metadata.whole("expert_shared_count", 0),
        "first_k_dense_replace": metadata.whole("leading_dense_block_count", 0),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "n_group": metadata.whole("expert_group_count", 1),
        "topk_group": metadata.whole("expert_group_used_count", 1),
    }


def latent_attention(metadata: GgufMetadata) -> dict[str, Any]:
    """Return the fields of attention with a latent; files have sizes for its two forms."""
    heads = metadata.whole("attention.head_count")
    is_joint = metadata.has("attention.key_length_mla")
    if is_joint:
        metadata.expect("attention.value_length", metadata.whole("attention.kv_lora_rank"))
    metadata.expect("attention.head_count_kv", 1 if is_joint else heads)
    return {
        "num_key_value_heads": heads,
        **latent_sizes(metadata, is_joint=is_joint),
        "rope_parameters": rotation(metadata) | _logarithm(metadata),
    }


def latent_sizes(metadata: GgufMetadata, *, is_joint: bool) -> dict[str, Any]:
    """Return the sizes of attention with a latent.

    Args:
        metadata: of the file.
        is_joint: whether its usual sizes are those of one head for all, the latent.
    """
    ending, rank = "_mla" if is_joint else "", metadata.whole("attention.kv_lora_rank")
    rotated, size = (
        metadata.whole("rope.dimension_count"),
        metadata.whole(f"attention.key_length{ending}"),
    )
    if not 0 < rotated < size:
        raise metadata.error("rope.dimension_count", rotated, f"fewer than {size}")
    if is_joint:
        metadata.expect("attention.key_length", rank + rotated)
    return {
        "head_dim": rotated,
        "kv_lora_rank": rank,
        "q_lora_rank": metadata.whole("attention.q_lora_rank", 0) or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": size - rotated,
        "v_head_dim": metadata.whole(f"attention.value_length{ending}"),
    }


def _logarithm(metadata: GgufMetadata) -> dict[str, float]:
    """Return by what scores grow with the factor of YaRN, of which files have a tenth."""
    found = metadata.number("rope.scaling.yarn_log_multiplier", 0.0)
    # A float32 of a tenth of a number with few digits.
    share = round(10 * found, 5)
    return {"mscale": share, "mscale_all_dim": share} if found else {}


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    metadata.expect("expert_gating_func", SOFTMAX)
    metadata.expect("expert_weights_norm", False)
    experts = shared_experts(metadata)
    is_grouped = experts["n_group"] > 1
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        **latent_attention(metadata),
        **experts,
        "norm_topk_prob": False,
        "topk_method": "group_limited_greedy" if is_grouped else "greedy",
    }


def _is_meant(metadata: GgufMetadata) -> bool:
    """Return whether a softmax chooses experts; the next version has a sigmoid."""
    return has_experts(metadata) and not scores_by_sigmoid(metadata)


def scores_by_sigmoid(metadata: GgufMetadata) -> bool:
    """Return whether a sigmoid scores the experts of a file."""
    return metadata.whole("expert_gating_func", 0) == SIGMOID


FAMILY = Family(
    name="deepseek_v2",
    sizes=SIZES,
    gguf=GgufForm(
        architecture="deepseek2", fields=_fields, is_meant=_is_meant, names=NAMES, joins=JOINS
    ),
)
