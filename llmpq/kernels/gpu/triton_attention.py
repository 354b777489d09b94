"""Triton kernels of attention on the blocks of a KV cache: one new token a row.

Importing this module imports triton, so only ``paged_decode`` does, and only where it is installed.
A program has the query heads of one key head and one split of a row's keys. It reads keys and
values where they lie, so a step moves them once; a second kernel joins the splits (flash-decoding:
Dao et al., 2023).

Keys of 8 bits are multiplied as integers, which are exact in 16-bit floats, and their scales are
applied to the scores; the scales of values are applied to the weights.

Pointers: ``query [H, N, d]``, ``keys [blocks, h, B, d]``, ``values [blocks, h, B, e]`` and the
scales of both, ``[blocks, h, B]`` or ``None``, by their strides in elements; ``slopes [H]`` of
ALiBi, float32 or ``None``; ``tables [R, W]``, ``positions [R]``, ``tokens [R]`` or ``None``, all
integers; ``parts [R, H, S, e]`` and ``lse [R, H, S]``, float32.

Shape legend: R rows, H query heads, h key heads, g of H / h query heads in a program, d features of
a key, e of a value, B tokens of a block, S splits, W blocks of a table.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _changed(
    score, key, slopes, softcap,
    HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Return scores ``[g, keys]`` with their bound and ALiBi's bias, float32."""
    if HAS_SOFTCAP:
        x = score / softcap
        small = tl.exp(-2.0 * tl.abs(x))
        bound = (1.0 - small) / (1.0 + small)  # the hyperbolic tangent of |x|
        score = softcap * tl.where(x < 0, -bound, bound)
    if HAS_SLOPES:
        bias = slopes[:, None] * key.to(tl.float32)[None, :]
        score += bias.to(ROUNDED).to(tl.float32)
    return score


@triton.jit(do_not_specialize=["splits"])
def paged_decode_kernel(  # noqa: PLR0915  parts of a kernel share its registers
    query_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, slopes_ptr,
    tables_ptr, positions_ptr, tokens_ptr, parts_ptr, lse_ptr,
    query_head, query_token, block_stride, head_stride, value_block_stride, value_head_stride,
    scale_block_stride, scale_head_stride, table_stride, splits, scaling, softcap,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, ROUNDS: tl.constexpr,
    IN_FLOAT32: tl.constexpr, BLOCK: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Write the weighted values of a split, and the logarithm of the sum of its weights.

    Programs are (row, key head and part of its query heads, split). Row ``r`` is token
    ``tokens[r]`` of the step, or ``r``. A split without keys has minus infinity for its sum, and no
    values. ``WINDOW`` and ``CHUNK`` are 0 for all tokens; ``ROUNDS`` rounds ALiBi's bias to the
    dtype of the query; ``IN_FLOAT32`` multiplies in float32, for the interpreter.
    """
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    TILES: tl.constexpr = (GROUP + BLOCK_G - 1) // BLOCK_G
    row, split = tl.program_id(0), tl.program_id(2)
    key_head, tile = tl.program_id(1) // TILES, tl.program_id(1) % TILES
    position = tl.load(positions_ptr + row).to(tl.int32)
    token = row.to(tl.int64)
    if tokens_ptr is not None:
        token = tl.load(tokens_ptr + row).to(tl.int64)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    if CHUNK > 0:
        first = tl.maximum(position // CHUNK * CHUNK, first)
    begin = first // KEYS
    tiles = position // KEYS + 1 - begin
    each = (tiles + splits - 1) // splits
    low = begin + split * each
    high = tl.minimum(low + each, begin + tiles)

    of_group = tile * BLOCK_G + tl.arange(0, BLOCK_G)
    is_head = of_group < GROUP
    head = key_head * GROUP + of_group
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    query = tl.load(
        query_ptr + token * query_token + head[:, None] * query_head + d[None, :],
        mask=is_head[:, None] & (d < HEAD_DIM)[None, :], other=0.0,
    )  # fmt: skip
    slopes = tl.zeros((BLOCK_G,), tl.float32)
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + head, mask=is_head, other=0.0)
    if IN_FLOAT32:
        query = query.to(tl.float32)
    # Weights times the scales of values may be too small for float16.
    IS_BF16: tl.constexpr = value_scales_ptr is not None and query.dtype == tl.float16
    WEIGHT: tl.constexpr = tl.bfloat16 if IS_BF16 else query.dtype
    top = tl.full((BLOCK_G,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    made = tl.zeros((BLOCK_G, BLOCK_E), tl.float32)
    for step in range(low, high):
        key = step * KEYS + tl.arange(0, KEYS)
        inside = (key <= position) & (key >= first)
        block = tl.load(
            tables_ptr + row.to(tl.int64) * table_stride + key // BLOCK, mask=inside, other=0
        ).to(tl.int64)
        place = key % BLOCK
        at = block * block_stride + key_head * head_stride + place * HEAD_DIM
        k = tl.load(
            keys_ptr + at[None, :] + d[:, None],
            mask=inside[None, :] & (d < HEAD_DIM)[:, None], other=0,
        )  # fmt: skip
        at = block * value_block_stride + key_head * value_head_stride + place * VALUE_DIM
        v = tl.load(
            values_ptr + at[:, None] + e[None, :],
            mask=inside[:, None] & (e < VALUE_DIM)[None, :], other=0,
        )  # fmt: skip
        score = tl.dot(query, k.to(query.dtype), input_precision="ieee") * scaling
        scale_at = block * scale_block_stride + key_head * scale_head_stride + place
        if key_scales_ptr is not None:
            scale = tl.load(key_scales_ptr + scale_at, mask=inside, other=0.0)
            score *= scale.to(tl.float32)[None, :]
        score = _changed(
            score, key, slopes, softcap, HAS_SOFTCAP, slopes_ptr is not None,
            query_ptr.dtype.element_ty if ROUNDS else tl.float32,
        )  # fmt: skip
        score = tl.where(inside[None, :], score, -float("inf"))
        # A split may begin before the first visible key of its tile: there is no highest yet.
        new = tl.maximum(top, tl.max(score, 1))
        low_end = tl.where(new == -float("inf"), 0.0, new)
        weight = tl.exp(score - low_end[:, None])
        fade = tl.exp(top - low_end)
        total = total * fade + tl.sum(weight, 1)
        if value_scales_ptr is not None:
            scale = tl.load(value_scales_ptr + scale_at, mask=inside, other=0.0)
            weight *= scale.to(tl.float32)[None, :]
        weight = weight.to(WEIGHT)
        made = made * fade[:, None] + tl.dot(weight, v.to(WEIGHT), input_precision="ieee")
        top = new

    at = (row.to(tl.int64) * HEADS + head) * splits + split
    has_keys = total != 0  # a NaN stays one
    safe = tl.where(has_keys, total, 1.0)
    tl.store(
        parts_ptr + at[:, None] * VALUE_DIM + e[None, :], made / safe[:, None],
        mask=(is_head & has_keys)[:, None] & (e < VALUE_DIM)[None, :],
    )  # fmt: skip
    lse = tl.where(has_keys, top + tl.log(safe), -float("inf"))
    tl.store(lse_ptr + at, lse, mask=is_head)


@triton.jit(do_not_specialize=["splits"])
def join_splits_kernel(
    parts_ptr, lse_ptr, sinks_ptr, tokens_ptr, out_ptr, splits,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Join the splits of a row and head: ``[N, H, e]``; programs are (row, head).

    A sink is one more score of a head, without a value.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = row
    if tokens_ptr is not None:
        token = tl.load(tokens_ptr + row).to(tl.int64)
    e, s = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_S)
    own = (row * HEADS + head) * splits
    tops = tl.full((BLOCK_S,), -float("inf"), tl.float32)
    for begin in range(0, splits, BLOCK_S):
        found = tl.load(lse_ptr + own + begin + s, mask=begin + s < splits, other=-float("inf"))
        tops = tl.maximum(tops, found)
    top = tl.max(tops, 0)
    total = tl.zeros((BLOCK_S,), tl.float32)
    made = tl.zeros((BLOCK_E,), tl.float32)
    extra = 0.0
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        top = tl.maximum(top, sink)
        extra = tl.exp(sink - top)
    for begin in range(0, splits, BLOCK_S):
        found = tl.load(lse_ptr + own + begin + s, mask=begin + s < splits, other=-float("inf"))
        weight = tl.exp(found - top)
        part = tl.load(
            parts_ptr + (own + begin + s)[:, None] * VALUE_DIM + e[None, :],
            mask=(found != -float("inf"))[:, None] & (e < VALUE_DIM)[None, :], other=0.0,
        )  # fmt: skip
        total += weight
        made += tl.sum(part * weight[:, None], 0)
    made /= tl.sum(total, 0) + extra
    place = out_ptr + (token * HEADS + head) * VALUE_DIM + e
    tl.store(place, made.to(out_ptr.dtype.element_ty), mask=e < VALUE_DIM)
