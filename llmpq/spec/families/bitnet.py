"""BitNet: Llama with norms inside attention and feed-forward."""

from __future__ import annotations

from llmpq.spec.families import Family
from llmpq.spec.huggingface.feed_forward import Gated
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="bitnet",
    sizes=Sizes(feed_forward=Gated(norm=True), norms=3),
)
