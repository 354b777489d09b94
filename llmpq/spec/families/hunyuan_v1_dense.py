"""Hunyuan: queries and keys are normed after their rotation."""

from __future__ import annotations

from llmpq.spec.families import Family, LayerForm
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="hunyuan_v1_dense",
    sizes=Sizes(
        attention=SelfAttention(norm="heads", norm_names=("query_layernorm", "key_layernorm"))
    ),
    form=LayerForm(norms_late=True),
)
