"""Qwen2 and Qwen2.5: queries, keys and values with a bias, windows from a layer on."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import GgufForm, GgufMetadata, TextSplit, words


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    del metadata
    return {"architectures": ["Qwen2ForCausalLM"]}


FAMILY = Family(
    name="qwen2",
    sizes=Sizes(attention=SelfAttention(bias=True, out_bias=False), windows=windows.from_layer),
    gguf=GgufForm(
        architecture="qwen2",
        fields=_fields,
        splits=(
            TextSplit(
                names=(
                    "qwen2",
                    "deepseek-r1-qwen",
                    "kormo",
                    "f2llmv2",
                    "megrez",
                    "stablelm2",
                    "hunyuan",
                    "solar-open",
                    "grok-2",
                ),
                patterns=(words(1),),
            ),
        ),
    ),
)
