"""OLMo 3: OLMo 2 with windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.spec.families import Family, olmo2
from llmpq.spec.huggingface import windows
from llmpq.spec.model_files.gguf_form import GgufForm, GgufMetadata, rotation, window_kinds


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    rope = rotation(metadata)
    # YaRN is that of the layers without a window.
    local = {
        "rope_type": "default",
        "rope_theta": metadata.number("rope.freq_base_swa", rope["rope_theta"]),
    }
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
        "attention_bias": False,
        "sliding_window": metadata.whole("attention.sliding_window"),
        "layer_types": window_kinds(metadata, 4),
    }


FAMILY = Family(
    name="olmo3",
    sizes=replace(olmo2.SIZES, windows=windows.by_period(4)),
    form=olmo2.FORM,
    gguf=GgufForm(architecture="olmo2", fields=_fields, is_meant=olmo2.has_windows),
)
