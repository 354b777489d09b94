"""LFM2: gated convolutions among layers of attention."""

from __future__ import annotations

from llmpq.spec.families import Family, LayerForm, ModelParts
from llmpq.spec.huggingface import mixers
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.config import Config
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="lfm2",
    parts=ModelParts(final_norm="embedding_norm"),
    form=LayerForm(norms=("operator_norm", None, "ffn_norm", None)),
    sizes=Sizes(
        attention=mixers.Hybrid(
            attention=SelfAttention(
                names=("q_proj", "k_proj", "v_proj", "out_proj"),
                bias=False,
                norm="heads",
                head_dim=Config.head_share,
            ),
            mixer=mixers.short_convolution,
            is_attention=mixers.by_list,
        ),
        feed_forward=mixers.adjusted_feed_forward,
    ),
)
