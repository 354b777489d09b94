"""Qwen3-MoE: normed queries and keys, experts."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Experts, RouterKind, by_step
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import SOFTMAX, GgufForm, GgufMetadata


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    metadata.expect("expert_gating_func", SOFTMAX)
    metadata.expect("expert_weights_norm", True)
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "num_experts": metadata.whole("expert_count"),
        "num_experts_per_tok": metadata.whole("expert_used_count"),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
        # llama.cpp always makes the chosen experts' shares add up to one.
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


FAMILY = Family(
    name="qwen3_moe",
    sizes=Sizes(
        attention=SelfAttention(norm="heads"),
        feed_forward=Experts(kind=RouterKind(normalizes="norm_topk_prob"), layers=by_step),
        windows=windows.if_used,
    ),
    gguf=GgufForm(architecture="qwen3moe", fields=_fields),
)
