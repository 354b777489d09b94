"""DeepSeek-V3: the sizes of DeepSeek-V2, another router."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import Family, deepseek_v2
from llmpq.spec.huggingface.feed_forward import RouterKind

MIXTURE = replace(
    deepseek_v2.MIXTURE, kind=RouterKind(score="sigmoid", normalizes="norm_topk_prob")
)

FAMILY = Family(
    name="deepseek_v3",
    sizes=replace(deepseek_v2.SIZES, feed_forward=MIXTURE),
)
