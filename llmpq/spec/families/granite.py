"""Granite: Llama with scales."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family, ModelParts, llama
from llmpq.spec.huggingface.feed_forward import Gated
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import (
    INTERLEAVED_HEADS,
    PLAIN_WORDS,
    GgufForm,
    GgufMetadata,
    TextSplit,
    has_bias,
)

PARTS = ModelParts(embedding_multiplier="embedding_multiplier", logits_divisor="logits_scaling")


def scale_fields(metadata: GgufMetadata) -> dict[str, Any]:
    """Return the fields of scales, and of bias in attention."""
    return {
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "attention_multiplier": metadata.number("attention.scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
        "attention_bias": llama.has_attention_bias(metadata),
    }


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    return {
        "architectures": ["GraniteForCausalLM"],
        **scale_fields(metadata),
        "mlp_bias": has_bias(metadata, "ffn_up"),
    }


FAMILY = Family(
    name="granite",
    sizes=Sizes(feed_forward=Gated(bias="mlp_bias")),
    parts=PARTS,
    gguf=GgufForm(
        architecture="granite",
        fields=_fields,
        changes=INTERLEAVED_HEADS,
        splits=(
            TextSplit(names=("refact", "starcoder", "codeshell"), patterns=(r"\p{N}", PLAIN_WORDS)),
            TextSplit(names=("granite-docling",), patterns=(PLAIN_WORDS,)),
        ),
    ),
)
