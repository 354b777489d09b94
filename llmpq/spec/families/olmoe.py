"""OLMoE: experts, queries and keys normed over all heads."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import Family, mixtral, olmo2

FAMILY = Family(
    name="olmoe",
    sizes=replace(olmo2.SIZES, feed_forward=mixtral.MIXTURE),
)
