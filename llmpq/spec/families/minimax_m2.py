"""MiniMax-M2: experts, queries and keys normed over all heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.spec.families import Family, mixtral
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import RouterKind
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import (
    SIGMOID,
    GgufForm,
    GgufMetadata,
    TextSplit,
    cased_words,
    partly_rotated,
)


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    metadata.expect("expert_gating_func", SIGMOID)
    return {
        "architectures": ["MiniMaxM2ForCausalLM"],
        **partly_rotated(metadata),
        "intermediate_size": metadata.whole("expert_feed_forward_length"),
        "num_local_experts": metadata.whole("expert_count"),
        "num_experts_per_tok": metadata.whole("expert_used_count"),
    }


FAMILY = Family(
    name="minimax_m2",
    sizes=Sizes(
        attention=SelfAttention(norm="rows", bias=False),
        feed_forward=replace(mixtral.MIXTURE, kind=RouterKind(score="sigmoid")),
    ),
    gguf=GgufForm(
        architecture="minimax-m2",
        fields=_fields,
        names=(("exp_probs_b.bias", "mlp.e_score_correction_bias"),),
        splits=(TextSplit(names=("minimax-m2",), patterns=(cased_words(3, endings=True),)),),
    ),
)
