"""GLM: gate and up as one matrix, neighbouring features rotated."""

from __future__ import annotations

from llmpq.spec.families import Family, LayerForm, phi3
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.sizes import Sizes

ATTENTION = SelfAttention(out_bias=False)

FAMILY = Family(
    name="glm",
    sizes=Sizes(attention=ATTENTION, feed_forward=phi3.FEED_FORWARD),
    form=LayerForm(rotation="pairs"),
)
