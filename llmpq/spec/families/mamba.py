"""Mamba: Mamba 1 in every layer, and nothing else."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family, LayerForm, ModelParts
from llmpq.spec.huggingface import mixers
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import (
    MAMBA1_NAMES,
    GgufForm,
    GgufMetadata,
    has_any,
    mamba1_changes,
)

PARTS = ModelParts(embedding="embeddings", final_norm="norm_f")
FORM = LayerForm(norms=("norm", None, None, None), rotation=None)
SIZES = Sizes(
    attention=mixers.Everywhere(
        mixers.Mamba1(
            prefix="mixer",
            expand="expand",
            width="intermediate_size",
            state_dim="state_size",
            kernel="conv_kernel",
            rank="time_step_rank",
            bias="use_bias",
            conv_bias="use_conv_bias",
        )
    ),
    feed_forward=mixers.no_feed_forward,
    norms=1,
)
NAMES = (("attn_norm.weight", "norm.weight"),)
OTHER_NAMES = (
    ("token_embd.weight", "model.embeddings.weight"),
    ("output_norm.weight", "model.norm_f.weight"),
)
_NORMS = "ssm.dt_b_c_rms"


def common_fields(metadata: GgufMetadata) -> dict[str, Any]:
    """Return the fields of Mamba 1 and 2, and leave out those of attention."""
    # The converter writes numbers of no meaning: no heads, and any length.
    for key in ("attention.head_count", "context_length"):
        metadata.whole(key, 0)
    absent = (
        "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
        "rms_norm_eps", "rope_parameters", "intermediate_size",
    )  # fmt: skip
    return {
        **dict.fromkeys(absent, ...),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_rms_epsilon"),
        "state_size": metadata.whole("ssm.state_size"),
        "conv_kernel": metadata.whole("ssm.conv_kernel"),
        "use_conv_bias": has_any(metadata, "ssm_conv1d.bias"),
        "use_bias": has_any(metadata, "ssm_in.bias"),
    }


def fields(metadata: GgufMetadata) -> dict[str, Any]:
    """Return the fields of Mamba 1."""
    is_normed = metadata.flag(_NORMS, default=False)
    width = metadata.whole("ssm.inner_size")
    return {
        "architectures": ["FalconMambaForCausalLM" if is_normed else "MambaForCausalLM"],
        **common_fields(metadata),
        "intermediate_size": width,
        "expand": width // metadata.whole("embedding_length"),
        "time_step_rank": metadata.whole("ssm.time_step_rank"),
    }


def form(*, is_normed: bool) -> GgufForm:
    """Return how Mamba 1 is stored, with norms of time steps, B and C or without."""
    return GgufForm(
        architecture="mamba",
        fields=fields,
        is_meant=lambda metadata: metadata.flag(_NORMS, default=False) == is_normed,
        names=(*NAMES, *((stored, f"mixer.{name}") for stored, name in MAMBA1_NAMES)),
        other_names=OTHER_NAMES,
        changes=mamba1_changes("mixer"),
    )


FAMILY = Family(name="mamba", parts=PARTS, form=FORM, sizes=SIZES, gguf=form(is_normed=False))
