"""Phi-3 and Phi-4: queries, keys and values as one matrix, and gate and up as another."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Gated
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import GgufForm, GgufMetadata, partly_rotated

FEED_FORWARD = Gated(names=("gate_up_proj", "down_proj"), activation="activation_fn", joined=True)


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    window = metadata.whole("attention.sliding_window", 0) or None
    return {
        "architectures": ["Phi3ForCausalLM"],
        **partly_rotated(metadata),
        "sliding_window": window,
        "original_max_position_embeddings": metadata.whole(
            "rope.scaling.original_context_length", metadata.whole("context_length")
        ),
    }


FAMILY = Family(
    name="phi3",
    sizes=Sizes(
        attention=SelfAttention(names=("qkv_proj", "o_proj"), bias=False),
        feed_forward=FEED_FORWARD,
        windows=windows.uniform,
    ),
    gguf=GgufForm(
        architecture="phi3",
        fields=_fields,
        names=(("ffn_up.weight", "mlp.gate_up_proj.weight"),),
    ),
)
