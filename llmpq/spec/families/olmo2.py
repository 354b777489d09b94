"""OLMo 2: norms after attention and feed-forward, queries and keys normed over all heads."""

from __future__ import annotations

from llmpq.spec.families import Family, LayerForm
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.sizes import Sizes

SIZES = Sizes(attention=SelfAttention(norm="rows"))
FORM = LayerForm(norms=(None, "post_attention_layernorm", None, "post_feedforward_layernorm"))

FAMILY = Family(
    name="olmo2",
    sizes=SIZES,
    form=FORM,
)
