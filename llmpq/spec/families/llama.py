"""Llama: the default of every field."""

from __future__ import annotations

from typing import Any

from llmpq.errors import SpecError
from llmpq.spec.families import Family
from llmpq.spec.huggingface.feed_forward import Gated
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import GgufForm, GgufMetadata

SIZES = Sizes(feed_forward=Gated(bias="mlp_bias"))


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": has_attention_bias(metadata),
        "mlp_bias": metadata.has_tensor("blk.0.ffn_up.bias"),
    }


def has_attention_bias(metadata: GgufMetadata) -> bool:
    """Return whether all projections of attention have a bias; errors where only some have one."""
    has_bias = metadata.has_tensor("blk.0.attn_q.bias")
    if has_bias != metadata.has_tensor("blk.0.attn_output.bias"):
        raise SpecError(
            f"{metadata.header.path}: found a bias in some projections of attention, expected "
            "all or none in a llama model"
        )
    return has_bias


FAMILY = Family(
    name="llama",
    sizes=SIZES,
    gguf=GgufForm(architecture="llama", fields=_fields, has_experts=False, interleaves_heads=True),
)
