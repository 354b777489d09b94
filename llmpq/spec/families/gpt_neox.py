"""GPT-NeoX (Pythia): attention and feed-forward side by side; query, key and value head by head."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family, LayerForm, ModelParts
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.config import Config
from llmpq.spec.huggingface.feed_forward import Plain
from llmpq.spec.huggingface.sizes import Sizes


def _form(config: Any, layer: int) -> LayerForm:
    del layer
    return LayerForm(is_parallel=config.use_parallel_residual, by_heads=True)


FAMILY = Family(
    name="gpt_neox",
    sizes=Sizes(
        attention=SelfAttention(
            prefix="attention", names=("query_key_value", "dense"), head_dim=Config.head_share
        ),
        feed_forward=Plain(names=("dense_h_to_4h", "dense_4h_to_h"), activation="act", bias=True),
        norm_tensors=2,
    ),
    parts=ModelParts(embedding="embed_in", final_norm="final_layer_norm", stored_head="embed_out"),
    form=_form,
)
