"""GLM 4.5: experts beside shared ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.spec.families import Family, MtpNames, deepseek_v2, deepseek_v3, glm
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import (
    SIGMOID,
    GgufForm,
    GgufMetadata,
    TextSplit,
    has_bias,
    partly_rotated,
    words,
)


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    metadata.expect("expert_gating_func", SIGMOID)
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        **partly_rotated(metadata),
        **deepseek_v3.expert_fields(metadata),
        "attention_bias": has_bias(metadata, "attn_q"),
        "use_qk_norm": metadata.has_tensor("blk.0.attn_q_norm.weight"),
    }


FAMILY = Family(
    name="glm4_moe",
    sizes=Sizes(
        attention=replace(glm.ATTENTION, norm="heads", norm_if="use_qk_norm"),
        feed_forward=deepseek_v3.MIXTURE,
    ),
    mtp=MtpNames(),
    gguf=GgufForm(
        architecture="glm4moe",
        fields=_fields,
        names=deepseek_v2.EXPERT_NAMES,
        splits=(TextSplit(names=("glm4", "chatglm-bpe"), patterns=(words(3),)),),
    ),
)
