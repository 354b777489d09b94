"""Granite with experts."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family, granite
from llmpq.spec.huggingface.feed_forward import Experts
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import INTERLEAVED_HEADS, SOFTMAX, GgufForm, GgufMetadata


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    metadata.expect("expert_gating_func", SOFTMAX)
    return {
        "architectures": ["GraniteMoeForCausalLM"],
        **granite.scale_fields(metadata),
        "num_local_experts": metadata.whole("expert_count"),
        "num_experts_per_tok": metadata.whole("expert_used_count"),
    }


FAMILY = Family(
    name="granitemoe",
    sizes=Sizes(
        feed_forward=Experts(
            prefix="block_sparse_moe", router="router", widths=("intermediate_size",)
        )
    ),
    parts=granite.PARTS,
    gguf=GgufForm(
        architecture="granitemoe",
        fields=_fields,
        names=(("ffn_gate_inp.weight", "block_sparse_moe.router.weight"),),
        experts="block_sparse_moe.experts",
        changes=INTERLEAVED_HEADS,
    ),
)
