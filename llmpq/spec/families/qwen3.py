"""Qwen3: normed queries and keys, windows from a layer on."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import GgufForm, GgufMetadata


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    del metadata
    return {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False}


FAMILY = Family(
    name="qwen3",
    sizes=Sizes(attention=SelfAttention(norm="heads"), windows=windows.from_layer),
    gguf=GgufForm(architecture="qwen3", fields=_fields),
)
