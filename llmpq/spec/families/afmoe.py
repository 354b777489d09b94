"""AFMoE (Trinity): normed queries and keys, a gate of attention, four norms, experts."""

from __future__ import annotations

from llmpq.spec.families import Family, LayerForm
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Experts, RouterKind, after_first
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="afmoe",
    sizes=Sizes(
        attention=SelfAttention(norm="heads", gate="gate_proj"),
        feed_forward=Experts(
            router="router.gate",
            kind=RouterKind(score="sigmoid"),
            shared="shared_experts",
            correction=1,
            layers=after_first("num_dense_layers"),
        ),
        windows=windows.by_period(4, "global_attn_every_n_layers"),
        norms=4,
    ),
    form=LayerForm(
        norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_mlp_layernorm",
            "post_mlp_layernorm",
        )
    ),
)
