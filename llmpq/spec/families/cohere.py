"""Cohere (Command R): attention and feed-forward side by side; neighbours are rotated."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import Family, LayerForm, ModelParts
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.sizes import Sizes

SIZES = Sizes(norms=1)
NORMS = ("input_layernorm", None, None, None)

FAMILY = Family(
    name="cohere",
    sizes=replace(SIZES, attention=SelfAttention(norm="rows", norm_if="use_qk_norm")),
    parts=ModelParts(logits_multiplier="logit_scale"),
    form=LayerForm(norms=NORMS, rotation="pairs", is_parallel=True),
)
