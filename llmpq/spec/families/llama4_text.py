"""Llama 4: chunks that attend to themselves, experts in some layers, complex rotations."""

from __future__ import annotations

from llmpq.spec.families import Family
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.feed_forward import Experts, Gated, RouterKind, by_list
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="llama4_text",
    own_modules=(("self_attn", "complex_rotary"), ("feed_forward", "scaled_experts")),
    sizes=Sizes(
        feed_forward=Experts(
            prefix="feed_forward",
            router="router",
            kind=RouterKind(score="sigmoid", normalizes=False),
            widths=("intermediate_size",),
            shared="shared_expert",
            shared_width=lambda fields: fields.size("intermediate_size"),
            layers=by_list,
            dense=Gated(
                prefix="feed_forward", activation="activation_fn", widths=("intermediate_size_mlp",)
            ),
        ),
        windows=windows.chunks,
    ),
)
