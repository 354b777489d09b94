"""OLMo 2: norms after attention and feed-forward, queries and keys normed over all heads."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family, LayerForm
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import PLAIN_WORDS, GgufForm, GgufMetadata, TextSplit, words

SIZES = Sizes(attention=SelfAttention(norm="rows"))
FORM = LayerForm(norms=(None, "post_attention_layernorm", None, "post_feedforward_layernorm"))


def has_windows(metadata: GgufMetadata) -> bool:
    """Return whether some layers have a window, as in the next version."""
    return metadata.has("attention.sliding_window")


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    del metadata
    return {"architectures": ["Olmo2ForCausalLM"], "attention_bias": False}


FAMILY = Family(
    name="olmo2",
    sizes=SIZES,
    form=FORM,
    gguf=GgufForm(
        architecture="olmo2",
        fields=_fields,
        is_meant=lambda found: not has_windows(found),
        splits=(
            TextSplit(names=("dbrx",), patterns=(words(3),)),
            TextSplit(names=("olmo",), patterns=(PLAIN_WORDS,)),
        ),
    ),
)
