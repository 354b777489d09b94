"""Seed-OSS: Llama with a bias of the attention's output apart."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Gated
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import GgufForm, GgufMetadata, TextSplit, has_bias, words

_WORDS = words(1, after_marks="")  # as Qwen's, but line ends do not stay with marks


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    return {
        "architectures": ["SeedOssForCausalLM"],
        "attention_bias": has_bias(metadata, "attn_q"),
        "attention_out_bias": has_bias(metadata, "attn_output"),
        "mlp_bias": has_bias(metadata, "ffn_up"),
    }


FAMILY = Family(
    name="seed_oss",
    sizes=Sizes(
        attention=SelfAttention(out_bias="attention_out_bias"),
        feed_forward=Gated(bias="mlp_bias"),
    ),
    gguf=GgufForm(
        architecture="seed_oss",
        fields=_fields,
        splits=(TextSplit(names=("seed-coder",), patterns=(_WORDS,)),),
    ),
)
