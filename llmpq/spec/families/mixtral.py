"""Mixtral: Mistral with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.errors import SpecError
from llmpq.spec.families import Family, llama, mistral
from llmpq.spec.huggingface.feed_forward import Experts
from llmpq.spec.model_files.gguf_form import (
    INTERLEAVED_HEADS,
    SOFTMAX,
    GgufForm,
    GgufMetadata,
    has_experts,
)

MIXTURE = Experts(widths=("intermediate_size",))


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    if llama.has_attention_bias(metadata):
        raise SpecError(f"{metadata.header.path}: found biases, expected none in a mixtral model")
    metadata.expect("expert_gating_func", SOFTMAX)
    return {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": metadata.whole("expert_count"),
        "num_experts_per_tok": metadata.whole("expert_used_count"),
        "sliding_window": None,
    }


FAMILY = Family(
    name="mixtral",
    sizes=replace(mistral.SIZES, feed_forward=MIXTURE),
    gguf=GgufForm(
        architecture="llama", fields=_fields, is_meant=has_experts, changes=INTERLEAVED_HEADS
    ),
)
