"""ERNIE 4.5: Llama with neighbouring features rotated."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family, LayerForm, llama
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Gated
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import GgufForm, GgufMetadata


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    return {
        "architectures": ["Ernie4_5ForCausalLM"],
        "use_bias": llama.has_attention_bias(metadata),
    }


FAMILY = Family(
    name="ernie4_5",
    sizes=Sizes(attention=SelfAttention(bias="use_bias"), feed_forward=Gated(bias="use_bias")),
    form=LayerForm(rotation="pairs"),
    gguf=GgufForm(architecture="ernie4_5", fields=_fields),
)
