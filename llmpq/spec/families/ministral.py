"""Ministral: Mistral with windows by layer."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import Family, mistral
from llmpq.spec.huggingface import windows

FAMILY = Family(
    name="ministral",
    sizes=replace(mistral.SIZES, windows=windows.everywhere),
)
