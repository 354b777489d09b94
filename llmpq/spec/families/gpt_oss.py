"""gpt-oss: attention sinks, windows in every other layer, experts with biases."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family, LayerForm
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Experts
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import (
    SOFTMAX_OF_CHOSEN,
    GgufForm,
    GgufMetadata,
    Join,
    TextSplit,
    cased_words,
    rotation,
    window_kinds,
)


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    metadata.expect("expert_gating_func", SOFTMAX_OF_CHOSEN)
    rope = rotation(metadata)
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False  # as all models of the family were made, which files do not say
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "intermediate_size": metadata.whole("expert_feed_forward_length"),
        "num_local_experts": metadata.whole("expert_count"),
        "num_experts_per_tok": metadata.whole("expert_used_count"),
        "sliding_window": metadata.whole("attention.sliding_window"),
        "layer_types": window_kinds(metadata, 2),
        "rope_parameters": rope,
    }


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
    gguf=GgufForm(
        architecture="gpt-oss",
        fields=_fields,
        names=(
            ("attn_sinks.weight", "self_attn.sinks"),
            ("ffn_gate_inp.weight", "mlp.router.weight"),
            ("ffn_gate_inp.bias", "mlp.router.bias"),
            ("ffn_down_exps.weight", "mlp.experts.down_proj"),
            ("ffn_down_exps.bias", "mlp.experts.down_proj_bias"),
        ),
        joins=tuple(
            Join(
                name=f"mlp.experts.gate_up_proj{ending}",
                parts=(f"ffn_gate_exps.{kind}", f"ffn_up_exps.{kind}"),
                how="alternating",
            )
            for ending, kind in (("", "weight"), ("_bias", "bias"))
        ),
        splits=(
            TextSplit(
                names=("gpt-4o", "kanana2", "talkie"), patterns=(cased_words(3, endings=True),)
            ),
        ),
    ),
)
