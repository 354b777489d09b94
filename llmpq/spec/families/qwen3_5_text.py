"""Qwen3.5: linear attention with four inputs in most layers."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family, qwen3_next
from llmpq.spec.huggingface import mixers
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import Change, GgufForm, GgufMetadata, TextSplit, words

SIZES = Sizes(
    attention=mixers.Hybrid(
        attention=qwen3_next.ATTENTION,
        mixer=mixers.gated_delta_net(mixers.separate_inputs),
        is_attention=mixers.by_interval,
    ),
)

NAMES = (
    *qwen3_next.STATE_NAMES,
    ("attn_qkv.weight", "linear_attn.in_proj_qkv.weight"),
    ("attn_gate.weight", "linear_attn.in_proj_z.weight"),
    ("ssm_alpha.weight", "linear_attn.in_proj_a.weight"),
    ("ssm_beta.weight", "linear_attn.in_proj_b.weight"),
)
CHANGES: tuple[tuple[str, tuple[Change, ...]], ...] = (
    ("linear_attn.A_log", ("tiled_values", "negative_exp")),
    ("linear_attn.dt_bias", ("tiled_values",)),
    ("linear_attn.in_proj_qkv.weight", ("tiled_values_last",)),
    ("linear_attn.in_proj_z.weight", ("tiled_values",)),
    ("linear_attn.in_proj_a.weight", ("tiled_values",)),
    ("linear_attn.in_proj_b.weight", ("tiled_values",)),
    ("linear_attn.conv1d.weight", ("tiled_values_last", "single_channels")),
    ("linear_attn.out_proj.weight", ("tiled_columns",)),
    *qwen3_next.STATE_NORMS,
)


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    return {"architectures": ["Qwen3_5ForCausalLM"], **qwen3_next.state_fields(metadata)}


FAMILY = Family(
    name="qwen3_5_text",
    sizes=SIZES,
    mtp=qwen3_next.MTP,
    gguf=GgufForm(
        architecture="qwen35",
        fields=_fields,
        names=NAMES,
        changes=CHANGES,
        splits=(TextSplit(names=("qwen35",), patterns=(words(1, letters=r"\p{L}\p{M}"),)),),
    ),
)
