"""Cohere 2 (Command A): Cohere with windows; layers without one rotate nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.spec.families import Family, LayerForm, ModelParts, cohere
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.windows import SLIDING
from llmpq.spec.model_files.gguf_form import (
    GgufForm,
    GgufMetadata,
    has_bias,
    layer_norms,
    window_kinds,
)


def _form(config: Any, layer: int) -> LayerForm:
    rotates = config.layer_types[layer] == SLIDING and config.sliding_window is not None
    return LayerForm(norms=cohere.NORMS, rotation="pairs" if rotates else None, is_parallel=True)


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    return {
        "architectures": ["Cohere2ForCausalLM"],
        **layer_norms(metadata),
        "logit_scale": metadata.number("logit_scale"),
        "sliding_window": metadata.whole("attention.sliding_window"),
        "layer_types": window_kinds(metadata, 4),
        "attention_bias": has_bias(metadata, "attn_q"),
    }


FAMILY = Family(
    name="cohere2",
    sizes=replace(cohere.SIZES, windows=windows.by_period(4, "sliding_window_pattern")),
    parts=ModelParts(logits_multiplier="logit_scale"),
    form=_form,
    gguf=GgufForm(architecture="cohere2", fields=_fields),
)
