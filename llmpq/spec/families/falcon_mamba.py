"""Falcon Mamba: Mamba whose time steps, B and C are normed without weights."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import mamba
from llmpq.spec.model_files.gguf_form import PLAIN_WORDS, TextSplit

_SPLIT = TextSplit(
    names=("falcon",),
    patterns=(r"[\p{P}\$\+<=>\^~\|`]+", PLAIN_WORDS.removesuffix(r"|\s+"), "[0-9][0-9][0-9]"),
)

FAMILY = replace(
    mamba.FAMILY,
    name="falcon_mamba",
    gguf=replace(mamba.form(is_normed=True), splits=(_SPLIT,)),
)
