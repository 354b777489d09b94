"""ERNIE 4.5 with experts in a range of layers."""

from __future__ import annotations

from llmpq.spec.families import Family, LayerForm
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Experts, Gated, by_interval
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="ernie4_5_moe",
    sizes=Sizes(
        attention=SelfAttention(bias="use_bias"),
        feed_forward=Experts(
            shared="shared_experts", correction=1, layers=by_interval, dense=Gated(bias="use_bias")
        ),
        head_bias="use_bias",
    ),
    form=LayerForm(rotation="pairs"),
)
