"""LFM2: gated convolutions among layers of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmpq.spec.families import Family, LayerForm, ModelParts
from llmpq.spec.huggingface import mixers
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.config import Config
from llmpq.spec.huggingface.feed_forward import FeedForward, Gated
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import (
    Change,
    GgufForm,
    GgufMetadata,
    TextSplit,
    attention_layers,
    has_any,
    words,
)

ATTENTION = mixers.Hybrid(
    attention=SelfAttention(
        names=("q_proj", "k_proj", "v_proj", "out_proj"),
        bias=False,
        norm="heads",
        norm_names=("q_layernorm", "k_layernorm", "v_layernorm"),
        head_dim=Config.head_share,
    ),
    mixer=mixers.short_convolution,
    is_attention=mixers.by_list,
)


BLOCK = Gated(prefix="feed_forward", names=("w1", "w3", "w2"), function="silu")


def _feed_forward(fields: Config) -> Sequence[FeedForward]:
    """Return feed-forwards whose width is two thirds of the stated one, rounded up."""
    width = fields.size("block_ff_dim", "intermediate_size")
    if fields.flag_or("block_auto_adjust_ff_dim", default=True):
        stated = fields.has("block_ffn_dim_multiplier")
        factor = fields.number("block_ffn_dim_multiplier") if stated else 1.0
        multiple = fields.size("block_multiple_of")
        width = -(-int(factor * int(2 * width / 3)) // multiple) * multiple
    return [BLOCK.of_width(fields, width)] * fields.layers()


NAMES = (
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
)
OTHER_NAMES = (
    ("token_embd_norm.weight", "model.embedding_norm.weight"),
    ("output_norm.weight", "model.embedding_norm.weight"),
)
CHANGES: tuple[tuple[str, tuple[Change, ...]], ...] = (("conv.conv.weight", ("single_channels",)),)


def layer_fields(metadata: GgufMetadata) -> dict[str, Any]:
    """Return the fields of attention and of convolutions."""
    is_attention, kv_heads = attention_layers(metadata)
    return {
        "rms_norm_eps": ...,
        "norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "num_key_value_heads": kv_heads,
        "layer_types": ["full_attention" if one else "conv" for one in is_attention],
        "conv_L_cache": metadata.whole("shortconv.l_cache"),
        "conv_bias": has_any(metadata, "shortconv.in_proj.bias"),
    }


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    return {
        "architectures": ["Lfm2ForCausalLM"],
        **layer_fields(metadata),
        "block_auto_adjust_ff_dim": False,
    }


FAMILY = Family(
    name="lfm2",
    parts=ModelParts(final_norm="embedding_norm"),
    form=LayerForm(norms=("operator_norm", None, "ffn_norm", None)),
    block=BLOCK,
    sizes=Sizes(
        attention=ATTENTION,
        feed_forward=_feed_forward,
    ),
    gguf=GgufForm(
        architecture="lfm2",
        fields=_fields,
        names=NAMES,
        other_names=OTHER_NAMES,
        changes=CHANGES,
        splits=(TextSplit(names=("lfm2",), patterns=(words(3),), keeps_tokens=True),),
    ),
)
