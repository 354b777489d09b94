"""Llama: the default of every field."""

from __future__ import annotations

from typing import Any

from llmpq.errors import SpecError
from llmpq.spec.families import Family
from llmpq.spec.huggingface.feed_forward import Gated
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import (
    INTERLEAVED_HEADS,
    PLAIN_WORDS,
    GgufForm,
    GgufMetadata,
    TextSplit,
    has_bias,
    has_none,
    words,
)

SIZES = Sizes(feed_forward=Gated(bias="mlp_bias"))


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": has_attention_bias(metadata),
        "mlp_bias": has_bias(metadata, "ffn_up"),
    }


def has_attention_bias(metadata: GgufMetadata) -> bool:
    """Return whether all projections of attention have a bias; errors where only some have one."""
    found = has_bias(metadata, "attn_q")
    if found != has_bias(metadata, "attn_output"):
        raise SpecError(
            f"{metadata.header.path}: found a bias in some projections of attention, expected "
            "all or none in a llama model"
        )
    return found


FAMILY = Family(
    name="llama",
    sizes=SIZES,
    gguf=GgufForm(
        architecture="llama",
        fields=_fields,
        is_meant=has_none,
        changes=INTERLEAVED_HEADS,
        splits=(
            TextSplit(
                names=(
                    "llama-bpe",
                    "llama3",
                    "llama-v3",
                    "falcon3",
                    "falcon-h1",
                    "pixtral",
                    "midm-2.0",
                ),
                patterns=(words(3),),
                keeps_tokens=True,
            ),
            TextSplit(names=("smaug-bpe",), patterns=(words(3),)),
            TextSplit(
                names=("default",),
                patterns=(r"[\p{P}\$\+<=>\^~\|]+", PLAIN_WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
            ),
        ),
    ),
)
