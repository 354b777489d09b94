"""Cohere (Command R): attention and feed-forward side by side; neighbours are rotated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.spec.families import Family, LayerForm, ModelParts
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import (
    PLAIN_WORDS,
    GgufForm,
    GgufMetadata,
    TextSplit,
    has_bias,
    layer_norms,
)

SIZES = Sizes(norms=1)
NORMS = ("input_layernorm", None, None, None)


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    return {
        "architectures": ["CohereForCausalLM"],
        **layer_norms(metadata),
        "logit_scale": metadata.number("logit_scale"),
        "use_qk_norm": metadata.has_tensor("blk.0.attn_q_norm.weight"),
        "attention_bias": has_bias(metadata, "attn_q"),
    }


FAMILY = Family(
    name="cohere",
    sizes=replace(SIZES, attention=SelfAttention(norm="rows", norm_if="use_qk_norm")),
    parts=ModelParts(logits_multiplier="logit_scale"),
    form=LayerForm(norms=NORMS, rotation="pairs", is_parallel=True),
    gguf=GgufForm(
        architecture="command-r",
        fields=_fields,
        splits=(TextSplit(names=("command-r",), patterns=(r"\p{N}", PLAIN_WORDS)),),
    ),
)
