"""Ministral 3: Mistral, with queries scaled at far positions."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family, mistral
from llmpq.spec.model_files.gguf_form import INTERLEAVED_HEADS, GgufForm, GgufMetadata, rotation


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    rope = rotation(metadata) | {
        "mscale": 1.0,
        "mscale_all_dim": metadata.number("rope.scaling.yarn_log_multiplier", 1.0),
        "llama_4_scaling_beta": metadata.number("attention.temperature_scale"),
    }
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
