"""GPT-BigCode (StarCoder): GPT-2 with one head of keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmpq.spec.families import Family, LayerForm, gpt2
from llmpq.spec.huggingface.config import Config


def _kv_heads(fields: Config) -> int:
    return 1 if fields.flag_or("multi_query", default=True) else fields.kv_heads("n_head")


def _form(config: Any, layer: int) -> LayerForm:
    del layer
    return LayerForm(norms=gpt2.NORMS, rotation=None, by_heads=not config.multi_query)


FAMILY = Family(
    name="gpt_bigcode",
    sizes=replace(gpt2.SIZES, attention=replace(gpt2.ATTENTION, kv_heads=_kv_heads)),
    parts=gpt2.PARTS,
    form=_form,
)
