"""Hunyuan with experts beside a shared one."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import Family, LayerForm, mixtral
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="hunyuan_v1_moe",
    sizes=Sizes(
        attention=SelfAttention(norm="heads", norm_names=("query_layernorm", "key_layernorm")),
        feed_forward=replace(
            mixtral.MIXTURE,
            router="gate.wg",
            shared="shared_mlp",
            shared_width=lambda fields: fields.size("intermediate_size"),
        ),
    ),
    form=LayerForm(norms_late=True),
)
