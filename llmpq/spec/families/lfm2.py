"""LFM2: gated convolutions among layers of attention."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family, LayerForm, ModelParts
from llmpq.spec.huggingface import mixers
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.config import Config
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import GgufForm, GgufMetadata, TextSplit, layer_count, words


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    heads = metadata.each("attention.head_count_kv", layer_count(metadata))
    counts = {count for count in heads if count}
    if len(counts) != 1:
        raise metadata.error("attention.head_count_kv", tuple(heads), "one number, or 0")
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "rms_norm_eps": ...,
        "norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "num_key_value_heads": counts.pop(),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": metadata.whole("shortconv.l_cache"),
        "conv_bias": any(
            name.endswith("shortconv.in_proj.bias") for name in metadata.header.tensors
        ),
        "block_auto_adjust_ff_dim": False,
    }


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
    gguf=GgufForm(
        architecture="lfm2",
        fields=_fields,
        names=(
            ("attn_norm.weight", "operator_norm.weight"),
            ("ffn_norm.weight", "ffn_norm.weight"),
            ("attn_q_norm.weight", "self_attn.q_layernorm.weight"),
            ("attn_k_norm.weight", "self_attn.k_layernorm.weight"),
            ("attn_output.weight", "self_attn.out_proj.weight"),
            ("ffn_gate.weight", "feed_forward.w1.weight"),
            ("ffn_down.weight", "feed_forward.w2.weight"),
            ("ffn_up.weight", "feed_forward.w3.weight"),
            *(
                (f"shortconv.{name}", f"conv.{name}")
                for part in ("in_proj", "conv", "out_proj")
                for name in (f"{part}.weight", f"{part}.bias")
            ),
        ),
        other_names=(
            ("token_embd_norm.weight", "model.embedding_norm.weight"),
            ("output_norm.weight", "model.embedding_norm.weight"),
        ),
        changes=(("conv.conv.weight", ("single_channels",)),),
        splits=(TextSplit(names=("lfm2",), patterns=(words(3),), keeps_tokens=True),),
    ),
)
