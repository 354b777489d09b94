"""GLM 4: GLM with four norms."""

from __future__ import annotations

from llmpq.spec.families import Family, LayerForm, glm, phi3
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="glm4",
    sizes=Sizes(attention=glm.ATTENTION, feed_forward=phi3.FEED_FORWARD, norms=4),
    form=LayerForm(
        norms=(
            "input_layernorm",
            "post_self_attn_layernorm",
            "post_attention_layernorm",
            "post_mlp_layernorm",
        ),
        rotation="pairs",
    ),
)
