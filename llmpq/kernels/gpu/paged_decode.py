"""Attention of one new token a row on the blocks of a KV cache (Triton).

The kernels are in ``triton_attention``, imported when first needed. A call depends on its shapes
only, so a CUDA graph can contain it.

Shapes: R rows, N tokens of the step, H heads, h KV heads, d features of a key, e of a value, B
tokens of a block.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmpq.kernels.cpu.paged_attention import PagedHeads
from llmpq.kernels.gpu.triton_int import current_device_of, launch_failure
from llmpq.spec.runtime_constants import MAX_DECODE_FEATURES, decode_splits

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_TILE_VALUES = 8192
_MAX_GROUP = 64
_SPLITS_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeRows:
    """Where the rows of a step with one new token each have their keys, on the device.

    Attributes:
        tables: blocks of each row, int32 ``[R, W]``; undefined after its last one.
        positions: of the new tokens, int32 ``[R]``.
        tokens: index of each row's token in the step, int32 ``[R]``; ``None`` if the rows are all.
    """

    tables: Tensor
    positions: Tensor
    tokens: Tensor | None = None


def can_attend(device: torch.device, dtype: torch.dtype, *features: int) -> bool:
    """Return whether the kernels run on a device, for keys and values of so many features.

    On a CPU that is in Triton's interpreter, where a test has imported it.
    """
    is_kind = device.type == "cuda" or (device.type == "cpu" and "triton" in sys.modules)
    fits = is_kind and dtype in DTYPES and max(features) <= MAX_DECODE_FEATURES
    return fits and launch_failure(device, dtype) is None


def attend(
    query: Tensor,
    heads: PagedHeads,
    rows: DecodeRows,
    out: Tensor,
    *,
    scaling: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    rounds_bias: bool = False,
) -> None:
    """Attend with the tokens of the rows to all keys of their sequences up to their own.

    Args:
        query: ``[1, H, N, d]``, features contiguous.
        heads: keys and values of the layer.
        rows: of one token each.
        out: ``[1, N, H, e]``, contiguous; receives the results of these tokens.
        scaling: factor of the scores.
        window: tokens a query sees, itself included; ``None`` for all.
        chunk: a query sees the tokens of its own chunk of this size; ``None`` for all.
        softcap: bound of the scores, by a hyperbolic tangent; ``None`` for none.
        sinks: ``[H]``, one more score of each head, without a value; ``None`` for none.
        slopes: float32 ``[H]``: times the position of a key they are its ALiBi bias.
        rounds_bias: whether that is rounded to the dtype of the query.
    """
    if query.stride(-1) != 1:
        query = query.contiguous()
    _, kv_heads, block, dim = heads.keys.shape
    count, value_dim = len(rows.positions), heads.values.shape[-1]
    num_heads = query.shape[1]
    splits = decode_splits(count, kv_heads)
    own = (count, num_heads, splits)
    parts = torch.empty((*own, value_dim), dtype=torch.float32, device=query.device)
    lse = torch.empty(own, dtype=torch.float32, device=query.device)
    scale_strides = (0, 0) if heads.key_scales is None else heads.key_scales.stride()[:2]
    group = num_heads // kv_heads
    block_g = min(_MAX_GROUP, max(16, _power(group)))
    block_d, block_e = max(16, _power(dim)), max(16, _power(value_dim))
    keys, warps, stages = tiles_of(
        max(block_d, block_e), query.dtype, is_coded=heads.key_scales is not None
    )
    with current_device_of(query):
        kernels().paged_decode_kernel[(count, kv_heads * -(-group // block_g), splits)](
            query, heads.keys, heads.values, heads.key_scales, heads.value_scales, slopes,
            rows.tables, rows.positions, rows.tokens, parts, lse,
            *query.stride()[1:3], *heads.keys.stride()[:2], *heads.values.stride()[:2],
            *scale_strides, rows.tables.stride(0), splits, scaling, softcap or 1.0,
            HEADS=num_heads, KEY_HEADS=kv_heads, HEAD_DIM=dim, VALUE_DIM=value_dim,
            WINDOW=window or 0, CHUNK=chunk or 0, HAS_SOFTCAP=softcap is not None,
            ROUNDS=rounds_bias,
            # The interpreter multiplies the bits of bf16 numbers as if they were integers.
            IN_FLOAT32=query.device.type == "cpu",
            BLOCK=block, BLOCK_G=block_g, BLOCK_D=block_d, BLOCK_E=block_e, KEYS=keys,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        kernels().join_splits_kernel[(count, num_heads)](
            parts, lse, sinks, rows.tokens, out, splits,
            HEADS=num_heads, VALUE_DIM=value_dim, BLOCK_S=_SPLITS_AT_ONCE, BLOCK_E=block_e,
        )  # fmt: skip


def tiles_of(features: int, dtype: torch.dtype, *, is_coded: bool) -> tuple[int, int, int]:
    """Return the keys that a program takes at once, its warps, and the stages of its loads.

    Chosen by what the compiler makes of them: fewest instructions without spilling
    (``benchmarks/results/gpu-kernels.json``).

    Args:
        features: of the larger tile, a power of two.
        dtype: of the query.
        is_coded: whether keys and values are 8-bit codes.
    """
    keys = max(16, min(64, _TILE_VALUES // features))
    if dtype == torch.float32:  # exact products run outside tensor cores, from registers
        return max(16, keys // 4), 4, 1
    return keys, 4 if is_coded or features > 128 else 2, 3


def kernels() -> Any:
    """Return the module of kernels; importing it imports triton."""
    from llmpq.kernels.gpu import triton_attention

    return triton_attention


def _power(count: int) -> int:
    """Return the next power of two: the sizes of Triton's blocks."""
    return 1 << (count - 1).bit_length()
