"""Gemma: norms that multiply by 1 + weight, scaled embeddings."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import GELU, SHIFTED_NORMS, GgufForm, GgufMetadata


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    del metadata
    return {"architectures": ["GemmaForCausalLM"]} | GELU


FAMILY = Family(
    name="gemma",
    sizes=Sizes(),
    gguf=GgufForm(architecture="gemma", fields=_fields, changes=SHIFTED_NORMS),
)
