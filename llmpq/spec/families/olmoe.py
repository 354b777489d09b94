"""OLMoE: experts, queries and keys normed over all heads."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import Family, mixtral, olmo2
from llmpq.spec.huggingface.feed_forward import RouterKind

MIXTURE = replace(mixtral.MIXTURE, kind=RouterKind(normalizes="norm_topk_prob"))

FAMILY = Family(
    name="olmoe",
    sizes=replace(olmo2.SIZES, feed_forward=MIXTURE),
)
