"""gpt-oss: attention sinks, windows in every other layer, experts with biases."""

from __future__ import annotations

from llmpq.spec.families import Family, LayerForm
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Experts
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="gpt_oss",
    own_modules=(("mlp.experts", "biased_experts"),),
    sizes=Sizes(
        attention=SelfAttention(sinks=True),
        feed_forward=Experts(
            router="router",
            router_bias=True,
            widths=("intermediate_size",),
            bias=True,
        ),
        windows=windows.by_period(2),
    ),
    writes_scores=True,
    form=LayerForm(rotation="short"),
)
