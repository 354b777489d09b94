"""Granite with experts."""

from __future__ import annotations

from llmpq.spec.families import Family, granite
from llmpq.spec.huggingface.feed_forward import Experts
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="granitemoe",
    sizes=Sizes(
        feed_forward=Experts(
            prefix="block_sparse_moe", router="router", widths=("intermediate_size",)
        )
    ),
    parts=granite.PARTS,
)
