"""Mamba 2 in every layer, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.spec.families import Family, mamba
from llmpq.spec.huggingface import mixers
from llmpq.spec.model_files.gguf_form import (
    MAMBA_NAMES,
    GgufForm,
    GgufMetadata,
    mamba_changes,
    state_space,
)


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    sizes = ("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel")
    return {
        "architectures": ["Mamba2ForCausalLM"],
        **mamba.common_fields(metadata),
        **state_space(metadata, sizes),
        "expand": metadata.whole("ssm.inner_size") // metadata.whole("embedding_length"),
    }


FAMILY = Family(
    name="mamba2",
    parts=mamba.PARTS,
    form=mamba.FORM,
    sizes=replace(
        mamba.SIZES,
        attention=mixers.Everywhere(
            mixers.Mamba2(
                prefix="mixer",
                heads="num_heads",
                head_dim="head_dim",
                groups="n_groups",
                state_dim="state_size",
                kernel="conv_kernel",
                bias="use_bias",
                conv_bias="use_conv_bias",
            )
        ),
    ),
    gguf=GgufForm(
        architecture="mamba2",
        fields=_fields,
        names=(*mamba.NAMES, *((stored, f"mixer.{name}") for stored, name in MAMBA_NAMES)),
        other_names=mamba.OTHER_NAMES,
        changes=mamba_changes("mixer"),
    ),
)
