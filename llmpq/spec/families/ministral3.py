"""Ministral 3: Mistral, with queries scaled at far positions."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family, mistral
from llmpq.spec.model_files.gguf_form import INTERLEAVED_HEADS, GgufForm, GgufMetadata, rotation


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    beta = metadata.number("attention.temperature_scale")
    rope = rotation(metadata) | {"llama_4_scaling_beta": beta}
    return {
        "architectures": ["Ministral3ForCausalLM"],
        "sliding_window": None,
        "rope_parameters": rope,
    }


FAMILY = Family(
    name="ministral3",
    sizes=mistral.SIZES,
    gguf=GgufForm(
        architecture="mistral3",
        fields=_fields,
        is_meant=mistral.scales_with_position,
        changes=INTERLEAVED_HEADS,
    ),
)
