"""Qwen2-MoE: experts beside one whose output a gate weighs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.spec.families import Family
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Experts, RouterKind, by_step
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import (
    SOFTMAX,
    Change,
    GgufForm,
    GgufMetadata,
    has_bias,
    routed_experts,
)

MIXTURE = Experts(
    kind=RouterKind(normalizes="norm_topk_prob"),
    shared="shared_expert",
    shared_gate=True,
    shared_width=lambda fields: fields.size("shared_expert_intermediate_size"),
)

SHARED_EXPERT = (
    ("ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight"),
    ("ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight"),
    ("ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight"),
    ("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight"),
)
"""Tensors of the expert of all tokens, in a GGUF file."""
SHARED_GATE: tuple[tuple[str, tuple[Change, ...]], ...] = (
    ("shared_expert_gate.weight", ("single_row",)),
)


def expert_fields(metadata: GgufMetadata) -> dict[str, Any]:
    """Return the fields of experts with one for all tokens."""
    metadata.expect("expert_gating_func", SOFTMAX)
    shared = metadata.whole("expert_shared_feed_forward_length")
    return {
        **routed_experts(metadata, "num_experts"),
        "shared_expert_intermediate_size": shared,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        **expert_fields(metadata),
        "norm_topk_prob": metadata.flag("expert_weights_norm", default=False),
        "qkv_bias": has_bias(metadata, "attn_q"),
        "use_sliding_window": False,
    }


FAMILY = Family(
    name="qwen2_moe",
    sizes=Sizes(
        attention=SelfAttention(bias="qkv_bias", out_bias=False),
        feed_forward=replace(MIXTURE, layers=by_step),
        windows=windows.every_other,
    ),
    gguf=GgufForm(
        architecture="qwen2moe", fields=_fields, names=SHARED_EXPERT, changes=SHARED_GATE
    ),
)
