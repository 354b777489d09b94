"""SmolLM3: Llama; every fourth layer rotates nothing."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family, LayerForm, llama
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.feed_forward import Gated
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import (
    INTERLEAVED_HEADS,
    PLAIN_WORDS,
    GgufForm,
    GgufMetadata,
    TextSplit,
    has_bias,
    layer_count,
)


def _form(config: Any, layer: int) -> LayerForm:
    rotates = config.no_rope_layers[layer]
    return LayerForm(rotation="halves" if rotates else None)


_WITHOUT_ROTATION = 4  # every how many layers there is one; files do not say


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    count = layer_count(metadata)
    return {
        "architectures": ["SmolLM3ForCausalLM"],
        "attention_bias": llama.has_attention_bias(metadata),
        "mlp_bias": has_bias(metadata, "ffn_up"),
        "no_rope_layers": [int((i + 1) % _WITHOUT_ROTATION != 0) for i in range(count)],
        "no_rope_layer_interval": _WITHOUT_ROTATION,
        "use_sliding_window": False,
    }


FAMILY = Family(
    name="smollm3",
    sizes=Sizes(feed_forward=Gated(bias="mlp_bias"), windows=windows.without_positions),
    form=_form,
    gguf=GgufForm(
        architecture="smollm3",
        fields=_fields,
        changes=INTERLEAVED_HEADS,
        splits=(TextSplit(names=("smollm",), patterns=(r"\p{N}", PLAIN_WORDS)),),
    ),
)
