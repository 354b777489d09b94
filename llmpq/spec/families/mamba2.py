"""Mamba 2 in every layer, and nothing else."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import Family, mamba
from llmpq.spec.huggingface import mixers

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
)
