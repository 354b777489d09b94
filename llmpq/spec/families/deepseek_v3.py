"""DeepSeek-V3: the sizes of DeepSeek-V2, another router."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.spec.families import Family, MtpNames, deepseek_v2
from llmpq.spec.huggingface.feed_forward import RouterKind
from llmpq.spec.model_files.gguf_form import GgufForm, GgufMetadata, TextSplit

MIXTURE = replace(
    deepseek_v2.MIXTURE, kind=RouterKind(score="sigmoid", normalizes="norm_topk_prob")
)


_PATTERNS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
"""Patterns of the tokenizer: digits, Chinese and Japanese, everything else."""


def expert_fields(metadata: GgufMetadata) -> dict[str, Any]:
    """Return the fields of experts that a sigmoid scores."""
    shares = metadata.flag("expert_weights_norm", default=False)
    return {**deepseek_v2.shared_experts(metadata), "norm_topk_prob": shares}


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        **deepseek_v2.latent_attention(metadata),
        **expert_fields(metadata),
    }


FAMILY = Family(
    name="deepseek_v3",
    sizes=replace(deepseek_v2.SIZES, feed_forward=MIXTURE),
    mtp=MtpNames(),
    gguf=GgufForm(
        architecture="deepseek2",
        fields=_fields,
        is_meant=deepseek_v2.scores_by_sigmoid,
        names=deepseek_v2.NAMES,
        joins=deepseek_v2.JOINS,
        splits=(
            TextSplit(names=("deepseek-v3", "hunyuan-dense", "joyai-llm"), patterns=_PATTERNS),
        ),
    ),
)
