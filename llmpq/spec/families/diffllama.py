"""DiffLlama: Llama with differential attention: the two halves of its heads attend separately."""

from __future__ import annotations

from llmpq.spec.families import Family
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="diffllama",
    sizes=Sizes(attention=SelfAttention(others=4)),
    attends_to_cache=False,
)
