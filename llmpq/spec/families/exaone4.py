"""EXAONE 4: late norms; beside layers with a window, others rotate nothing."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family, LayerForm, olmo2
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.huggingface.windows import SLIDING
from llmpq.spec.model_files.gguf_form import (
    PLAIN_WORDS,
    GgufForm,
    GgufMetadata,
    TextSplit,
    layer_count,
    window_kinds,
)


def rotates(config: Any, layer: int) -> bool:
    """Return whether a layer rotates: beside layers with a window, others rotate nothing."""
    return bool(config.sliding_window is None or config.layer_types[layer] == SLIDING)


def _form(config: Any, layer: int) -> LayerForm:
    return LayerForm(norms=olmo2.FORM.norms, rotation="halves" if rotates(config, layer) else None)


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    window = metadata.whole("attention.sliding_window", 0) or None
    full = ["full_attention"] * layer_count(metadata)
    return {
        "architectures": ["Exaone4ForCausalLM"],
        "sliding_window": window,
        "sliding_window_pattern": None,
        "layer_types": full if window is None else window_kinds(metadata, 4),
    }


FAMILY = Family(
    name="exaone4",
    sizes=Sizes(
        attention=SelfAttention(bias=False, norm="heads"),
        windows=windows.by_period(4, "sliding_window_pattern"),
    ),
    form=_form,
    gguf=GgufForm(
        architecture="exaone4",
        fields=_fields,
        splits=(
            TextSplit(names=("exaone4",), patterns=(PLAIN_WORDS,)),
            TextSplit(names=("exaone",), patterns=(r"\p{N}", PLAIN_WORDS)),
        ),
    ),
)
