"""SmolLM3: Llama; every fourth layer rotates nothing."""

from __future__ import annotations

from llmpq.spec.families import Family
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.feed_forward import Gated
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="smollm3",
    sizes=Sizes(feed_forward=Gated(bias="mlp_bias"), windows=windows.without_positions),
)
