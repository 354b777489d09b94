"""EXAONE with experts: Llama's norms, and normed queries and keys."""

from __future__ import annotations

from llmpq.spec.families import Family, deepseek_v2, exaone4
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="exaone_moe",
    sizes=Sizes(
        attention=SelfAttention(bias=False, norm="heads"),
        feed_forward=deepseek_v2.MIXTURE,
        windows=windows.by_period(4, "sliding_window_pattern"),
    ),
    form=exaone4.form,
)
