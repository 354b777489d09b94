"""Gemma 3: Gemma 2 with normed queries and keys; layers with windows have their own rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.spec.families import Family, gemma2
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.model_files.gguf_form import (
    FOUR_NORMS,
    GELU,
    SHIFTED_NORMS,
    GgufForm,
    GgufMetadata,
    query_scalar,
    rotation,
    window_kinds,
)

_LAYERS_OF_27B = 62
_LOCAL_THETA = 10_000.0  # base of the layers with windows, which older files do not state


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    if not metadata.has("attention.sliding_window"):
        raise metadata.error("attention.sliding_window", None, "windows, as Gemma 3 has them")
    theta = metadata.number("rope.freq_base_swa", _LOCAL_THETA)
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "query_pre_attn_scalar": query_scalar(metadata, _LAYERS_OF_27B),
        "sliding_window": metadata.whole("attention.sliding_window"),
        "layer_types": window_kinds(metadata, 6),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": (
            metadata.number("final_logit_softcapping")
            if metadata.has("final_logit_softcapping")
            else None
        ),
        "rope_parameters": {
            "full_attention": rotation(metadata),
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
    } | GELU


FAMILY = Family(
    name="gemma3_text",
    sizes=replace(
        gemma2.SIZES,
        attention=SelfAttention(norm="heads"),
        windows=windows.by_period(6, "sliding_window_pattern"),
    ),
    form=gemma2.FORM,
    gguf=GgufForm(architecture="gemma3", fields=_fields, names=FOUR_NORMS, changes=SHIFTED_NORMS),
)
