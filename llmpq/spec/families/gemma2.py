"""Gemma 2: four norms, windows in every other layer, bounded scores."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family, LayerForm
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import (
    FOUR_NORMS,
    GELU,
    SHIFTED_NORMS,
    GgufForm,
    GgufMetadata,
    query_scalar,
)

SIZES = Sizes(norms=4, windows=windows.by_period(2))
FORM = LayerForm(
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
)

_LAYERS_OF_27B = 46


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "query_pre_attn_scalar": query_scalar(metadata, _LAYERS_OF_27B),
        "sliding_window": metadata.whole("attention.sliding_window", 4096),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    } | GELU


FAMILY = Family(
    name="gemma2",
    sizes=SIZES,
    form=FORM,
    writes_scores=True,
    gguf=GgufForm(architecture="gemma2", fields=_fields, names=FOUR_NORMS, changes=SHIFTED_NORMS),
)
