"""DeepSeek-V3: the sizes of DeepSeek-V2."""

from __future__ import annotations

from llmpq.spec.families import Family, deepseek_v2

FAMILY = Family(
    name="deepseek_v3",
    sizes=deepseek_v2.SIZES,
)
