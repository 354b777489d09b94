"""EXAONE 4: late norms; beside layers with a window, others rotate nothing."""

from __future__ import annotations

from llmpq.spec.families import Family
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="exaone4",
    sizes=Sizes(
        attention=SelfAttention(bias=False, norm="heads"),
        windows=windows.by_period(4, "sliding_window_pattern"),
    ),
)
