"""nanochat: norms without weights, one of them at both ends; a feed-forward without a gate."""

from __future__ import annotations

from llmpq.spec.families import Family, ModelParts
from llmpq.spec.huggingface.feed_forward import Plain
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="nanochat",
    sizes=Sizes(
        feed_forward=Plain(names=("fc1", "fc2"), activation="activation_fn"), norm_tensors=0
    ),
    parts=ModelParts(embedding_norm="norm"),
)
