"""LFM2 with experts."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family, lfm2
from llmpq.spec.huggingface.feed_forward import Experts, RouterKind, after_first
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import SIGMOID, GgufForm, GgufMetadata, routed_experts


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    metadata.expect("expert_gating_func", SIGMOID)
    return {
        "architectures": ["Lfm2MoeForCausalLM"],
        **lfm2.layer_fields(metadata),
        **routed_experts(metadata, "num_experts"),
        "num_dense_layers": metadata.whole("leading_dense_block_count"),
        "use_expert_bias": any(".exp_probs_b." in name for name in metadata.header.tensors),
    }


FAMILY = Family(
    name="lfm2_moe",
    parts=lfm2.FAMILY.parts,
    form=lfm2.FAMILY.form,
    sizes=Sizes(
        attention=lfm2.ATTENTION,
        feed_forward=Experts(
            prefix="feed_forward",
            kind=RouterKind(score="sigmoid", normalizes="norm_topk_prob"),
            layers=after_first("num_dense_layers"),
            dense=lfm2.BLOCK,
        ),
    ),
    gguf=GgufForm(
        architecture="lfm2moe",
        fields=_fields,
        names=(
            *lfm2.NAMES,
            ("ffn_gate_inp.weight", "feed_forward.gate.weight"),
            ("exp_probs_b.bias", "feed_forward.expert_bias"),
        ),
        other_names=lfm2.OTHER_NAMES,
        experts="feed_forward.experts",
        changes=lfm2.CHANGES,
    ),
)
