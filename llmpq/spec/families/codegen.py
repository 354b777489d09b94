"""CodeGen: GPT-J with queries, keys and values as one matrix."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import Family, LayerForm, gptj

FAMILY = Family(
    name="codegen",
    own_modules=(("attn", "split_scores"),),
    sizes=replace(gptj.SIZES, attention=replace(gptj.ATTENTION, names=("qkv_proj", "out_proj"))),
    parts=gptj.PARTS,
    form=LayerForm(norms=gptj.NORMS, rotation="pairs", is_parallel=True),
)
