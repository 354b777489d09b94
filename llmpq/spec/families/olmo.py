"""OLMo: norms without weights."""

from __future__ import annotations

from llmpq.spec.families import Family
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="olmo",
    sizes=Sizes(norm_tensors=0),
)
