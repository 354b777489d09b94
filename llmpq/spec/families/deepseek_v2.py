"""DeepSeek-V2: latent attention, and experts beside shared ones."""

from __future__ import annotations

from llmpq.spec.families import Family
from llmpq.spec.huggingface.attention import LatentAttention
from llmpq.spec.huggingface.feed_forward import Experts, RouterKind, after_first
from llmpq.spec.huggingface.sizes import Sizes

MIXTURE = Experts(
    kind=RouterKind(normalizes=False),
    shared="shared_experts",
    layers=after_first("first_k_dense_replace"),
)
SIZES = Sizes(attention=LatentAttention(), feed_forward=MIXTURE)

FAMILY = Family(
    name="deepseek_v2",
    sizes=SIZES,
)
