"""InternLM 3: the sizes of Llama."""

from __future__ import annotations

from llmpq.spec.families import Family, llama

FAMILY = Family(
    name="internlm3",
    sizes=llama.SIZES,
)
