"""Phi: one norm, attention and feed-forward side by side."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family, LayerForm, ModelParts
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Plain
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import (
    PLAIN_WORDS,
    GgufForm,
    GgufMetadata,
    TextSplit,
    layer_norms,
    partly_rotated,
)


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    return {
        "architectures": ["PhiForCausalLM"],
        **partly_rotated(metadata),
        **layer_norms(metadata),
        "hidden_act": "gelu_new",
        "qk_layernorm": False,
    }


FAMILY = Family(
    name="phi",
    sizes=Sizes(
        attention=SelfAttention(
            names=("q_proj", "k_proj", "v_proj", "dense"),
            bias=True,
            norm="heads",
            norm_names=("q_layernorm", "k_layernorm"),
            norm_tensors=2,
            norm_if="qk_layernorm",
        ),
        feed_forward=Plain(names=("fc1", "fc2"), activation="activation_fn", bias=True),
        norms=1,
        norm_tensors=2,
        head_bias=True,
    ),
    parts=ModelParts(final_norm="final_layernorm"),
    has_formula=True,
    form=LayerForm(norms=("input_layernorm", None, None, None), is_parallel=True),
    gguf=GgufForm(
        architecture="phi2",
        fields=_fields,
        names=tuple(
            (f"{stored}.{kind}", f"{name}.{kind}")
            for stored, name in (
                ("attn_norm", "input_layernorm"),
                ("attn_output", "self_attn.dense"),
                ("ffn_up", "mlp.fc1"),
                ("ffn_down", "mlp.fc2"),
            )
            for kind in ("weight", "bias")
        ),
        other_names=(
            ("output_norm.weight", "model.final_layernorm.weight"),
            ("output_norm.bias", "model.final_layernorm.bias"),
            ("output.bias", "lm_head.bias"),
        ),
        splits=(
            TextSplit(
                names=("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt"),
                patterns=(PLAIN_WORDS,),
            ),
        ),
    ),
)
