"""Qwen3.5 with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.spec.families import Family, qwen2_moe, qwen3_5_text, qwen3_next
from llmpq.spec.huggingface.feed_forward import RouterKind
from llmpq.spec.model_files.gguf_form import GgufForm, GgufMetadata


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    metadata.expect("expert_weights_norm", True)
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "intermediate_size": ...,
        **qwen3_next.state_fields(metadata),
        **qwen2_moe.expert_fields(metadata),
        "norm_topk_prob": True,
    }


FAMILY = Family(
    name="qwen3_5_moe_text",
    sizes=replace(qwen3_5_text.SIZES, feed_forward=replace(qwen2_moe.MIXTURE, kind=RouterKind())),
    mtp=qwen3_next.MTP,
    gguf=GgufForm(
        architecture="qwen35moe",
        fields=_fields,
        names=(*qwen2_moe.SHARED_EXPERT, *qwen3_5_text.NAMES),
        changes=(*qwen2_moe.SHARED_GATE, *qwen3_5_text.CHANGES),
    ),
)
