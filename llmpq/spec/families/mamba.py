"""Mamba: Mamba 1 in every layer, and nothing else."""

from __future__ import annotations

from llmpq.spec.families import Family, LayerForm, ModelParts
from llmpq.spec.huggingface import mixers
from llmpq.spec.huggingface.sizes import Sizes

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

FAMILY = Family(name="mamba", parts=PARTS, form=FORM, sizes=SIZES)
