"""Mistral: Llama without biases, with windows."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import (
    INTERLEAVED_HEADS,
    GgufForm,
    GgufMetadata,
    TextSplit,
    cased_words,
)

SIZES = Sizes(attention=SelfAttention(bias=False), windows=windows.uniform)


def scales_with_position(metadata: GgufMetadata) -> bool:
    """Return whether scores grow with the position, as in the next version."""
    return metadata.has("attention.temperature_scale")


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    del metadata
    return {"architectures": ["MistralForCausalLM"], "sliding_window": None}


FAMILY = Family(
    name="mistral",
    sizes=SIZES,
    gguf=GgufForm(
        architecture="mistral3",
        fields=_fields,
        is_meant=lambda found: not scales_with_position(found),
        changes=INTERLEAVED_HEADS,
        splits=(
            TextSplit(
                names=("tekken",), patterns=(cased_words(1, endings=False),), keeps_tokens=True
            ),
        ),
    ),
)
