"""Triton kernels of a decoder layer between its products: norms, rotation and store, activation.

Importing this module imports triton, so only ``rows`` does, and only where it is installed. What a
product returns may be parts ``[P, ...]`` that are yet to be summed, and lack its bias: the kernel
that reads it first adds them up, in order, and rounds once to the dtype of the run, as a product
does. Numbers are rounded where transformers rounds them.

Shape legend: N tokens, C columns, H heads of queries, h of keys, d features of a head, P parts.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _summed(ptr, bias_ptr, at, column, inside, parts, part_stride, dtype: tl.constexpr):
    """Return the sum of parts at ``at``, and of the bias at ``column``, rounded: float32."""
    total = tl.zeros_like(at).to(tl.float32)
    place = ptr + at
    for _ in range(parts):
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        place += part_stride
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return total.to(dtype).to(tl.float32)


@triton.jit
def _normed(
    x, weight_ptr, bias_ptr, column, inside, size, epsilon,
    CENTERS: tl.constexpr, ROUNDS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return the norm of ``size`` numbers, 0 where not ``inside``: float32, rounded to ``dtype``.

    ``ROUNDS`` rounds them before the weight multiplies them, too.
    """
    if CENTERS:
        x = tl.where(inside, x - tl.sum(x, 0) / size, 0.0)
    x = x / tl.sqrt(tl.sum(x * x, 0) / size + epsilon)
    if ROUNDS:
        x = x.to(dtype).to(tl.float32)
    if weight_ptr is not None:
        x = x * tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x = x + tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return x.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["parts", "part_stride"])
def add_norm_kernel(
    hidden_ptr, made_ptr, made_bias_ptr, inner_weight_ptr, inner_bias_ptr, weight_ptr, bias_ptr,
    total_ptr, out_ptr,
    parts, part_stride, made_row, factor, inner_epsilon, epsilon,
    C: tl.constexpr, IS_SCALED: tl.constexpr,
    INNER_CENTERS: tl.constexpr, INNER_ROUNDS: tl.constexpr, HAS_INNER: tl.constexpr,
    CENTERS: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add what a module made to hidden states, and norm the sum: ``[N, C]``; a program a token.

    ``total = hidden + factor * inner_norm(made)`` and ``out = norm(total)``. Without ``made`` the
    total is ``hidden``, and is not written; without ``out`` there is no norm.
    """
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < C
    x = tl.load(hidden_ptr + token * C + column, mask=inside, other=0.0).to(tl.float32)
    if made_ptr is not None:
        at = token * made_row + column
        made = _summed(made_ptr, made_bias_ptr, at, column, inside, parts, part_stride, dtype)
        if HAS_INNER:
            made = _normed(
                made, inner_weight_ptr, inner_bias_ptr, column, inside, C, inner_epsilon,
                INNER_CENTERS, INNER_ROUNDS, dtype,
            )  # fmt: skip
        if IS_SCALED:
            made = (made * factor).to(dtype).to(tl.float32)
        x = (x + made).to(dtype)
        tl.store(total_ptr + token * C + column, x, mask=inside)
        x = x.to(tl.float32)
    if out_ptr is not None:
        x = _normed(
            x, weight_ptr, bias_ptr, column, inside, C, epsilon, CENTERS, ROUNDS, dtype
        )  # fmt: skip
        tl.store(out_ptr + token * C + column, x.to(dtype), mask=inside)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    """Return an activation of float32 numbers, in the order of ``step.ACTIVATIONS``."""
    if ACTIVATION == 0:  # silu
        x = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == 1:  # gelu
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 2:  # gelu_tanh: half of one plus the hyperbolic tangent is a sigmoid
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x / (1.0 + tl.exp(-2.0 * inner))
    elif ACTIVATION == 3:  # relu
        x = tl.where(x < 0, 0.0, x)  # a NaN stays one
    elif ACTIVATION == 4:  # relu2
        x = tl.where(x < 0, 0.0, x)
        x = x * x
    else:  # sigmoid
        x = 1.0 / (1.0 + tl.exp(-x))
    return x


@triton.jit(do_not_specialize=["parts", "part_stride", "up_parts", "up_part_stride"])
def gate_kernel(
    gate_ptr, gate_bias_ptr, up_ptr, up_bias_ptr, out_ptr,
    columns, parts, part_stride, gate_row, up_parts, up_part_stride, up_row,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write ``activation(gate) * up``, ``[N, C]``; programs are (token, block of columns)."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = token * gate_row + column
    x = _summed(gate_ptr, gate_bias_ptr, at, column, inside, parts, part_stride, dtype)
    x = _activated(x, ACTIVATION)
    if up_ptr is not None:
        x = x.to(dtype).to(tl.float32)
        at = token * up_row + column
        x *= _summed(up_ptr, up_bias_ptr, at, column, inside, up_parts, up_part_stride, dtype)
    tl.store(out_ptr + token * columns + column, x.to(dtype), mask=inside)


@triton.jit
def _weighted(x, weight_ptr, column, inside, root, ROUNDS: tl.constexpr, dtype: tl.constexpr):
    """Return ``x / root * weight`` as :func:`_normed` does, for a root that is known."""
    x = x / root
    if ROUNDS:
        x = x.to(dtype).to(tl.float32)
    x = x * tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return x.to(dtype).to(tl.float32)


@triton.jit
def _head(
    ptr, bias_ptr, weight_ptr, cos_ptr, sin_ptr, token, head, d,
    parts, part_stride, row_stride, head_stride, epsilon,
    dtype: tl.constexpr, DIM: tl.constexpr, TURNED: tl.constexpr, TABLE: tl.constexpr,
    ROUNDS: tl.constexpr, IS_LATE: tl.constexpr,
):  # fmt: skip
    """Return a head of a token, normed and rotated: float32 numbers of ``dtype``, ``[d]``."""
    HALF: tl.constexpr = TURNED // 2
    NORMS_FIRST: tl.constexpr = weight_ptr is not None and not IS_LATE
    NORMS_LAST: tl.constexpr = weight_ptr is not None and IS_LATE
    inside = d < DIM
    row, column = token * row_stride + head * head_stride, head * head_stride
    x = _summed(ptr, bias_ptr, row + d, column + d, inside, parts, part_stride, dtype)
    root = 1.0
    if NORMS_FIRST:
        root = tl.sqrt(tl.sum(x * x, 0) / DIM + epsilon)
        x = _weighted(x, weight_ptr, d, inside, root, ROUNDS, dtype)
    if cos_ptr is not None:
        is_turned = d < TURNED
        other = tl.where(d < HALF, d + HALF, d - HALF)  # the feature that is rotated with it
        y = _summed(
            ptr, bias_ptr, row + other, column + other, is_turned, parts, part_stride, dtype
        )
        if NORMS_FIRST:
            y = _weighted(y, weight_ptr, other, is_turned, root, ROUNDS, dtype)
        y = tl.where(d < HALF, -y, y)
        angle = token * TABLE + d % TABLE
        cos = tl.load(cos_ptr + angle, mask=is_turned, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=is_turned, other=0.0).to(tl.float32)
        rounded: tl.constexpr = cos_ptr.dtype.element_ty
        turned = (x * cos).to(rounded).to(tl.float32) + (y * sin).to(rounded).to(tl.float32)
        x = tl.where(is_turned, turned.to(dtype).to(tl.float32), x)
    if NORMS_LAST:
        root = tl.sqrt(tl.sum(x * x, 0) / DIM + epsilon)
        x = _weighted(x, weight_ptr, d, inside, root, ROUNDS, dtype)
    return x


@triton.jit
def _store(x, ptr, scales_ptr, at, scale_at, d, DIM: tl.constexpr):
    """Store a head at ``at``; with scales as 8-bit codes, as ``kv.cache.quantize_tokens``."""
    inside = d < DIM
    if scales_ptr is not None:
        peak = tl.max(tl.abs(x), 0)
        has_nan = tl.max((x != x).to(tl.int32), 0) > 0
        peak = tl.where(has_nan, float("nan"), peak)
        scale = (peak * (1 / 127)).to(scales_ptr.dtype.element_ty)
        tl.store(scales_ptr + scale_at, scale)
        x = x / tl.maximum(scale.to(tl.float32), 1.1754943508222875e-38)
        x = tl.where(x == x, x, 0.0)
        x = (x + 12582912.0) - 12582912.0  # the nearest integer, ties to even
        x = tl.minimum(tl.maximum(x, -127.0), 127.0)
    tl.store(ptr + at + d, x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=[
        "query_parts", "query_part", "key_parts", "key_part", "value_parts", "value_part"
    ]
)  # fmt: skip
def rotate_store_kernel(
    query_ptr, key_ptr, value_ptr, query_bias_ptr, key_bias_ptr, value_bias_ptr,
    query_weight_ptr, key_weight_ptr, cos_ptr, sin_ptr,
    rotated_ptr, new_keys_ptr, new_values_ptr,
    blocks_ptr, offsets_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr,
    query_parts, query_part, query_row, query_head,
    key_parts, key_part, key_row, key_head,
    value_parts, value_part, value_row, value_head,
    block_stride, head_stride, value_block_stride, value_head_stride,
    scale_block_stride, scale_head_stride, query_epsilon, key_epsilon,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TURNED: tl.constexpr, TABLE: tl.constexpr, QUERY_ROUNDS: tl.constexpr,
    KEY_ROUNDS: tl.constexpr, IS_LATE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Norm and rotate queries and keys, and store keys and values; programs are (token, head).

    Heads are those of queries, of keys, then of values. ``rotated [N, H, d]`` gets the queries,
    ``new_keys [N, h, d]`` and ``new_values`` get the others, and so do blocks where there are any.
    Only the first ``TURNED`` features are rotated, with those half of them away;
    ``TABLE`` is the width of the tables, as many or half.
    """
    dtype: tl.constexpr = rotated_ptr.dtype.element_ty
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    if head < HEADS:
        x = _head(
            query_ptr, query_bias_ptr, query_weight_ptr, cos_ptr, sin_ptr, token, head, d,
            query_parts, query_part, query_row, query_head, query_epsilon,
            dtype, HEAD_DIM, TURNED, TABLE, QUERY_ROUNDS, IS_LATE,
        )  # fmt: skip
        _store(x, rotated_ptr, None, (token * HEADS + head) * HEAD_DIM, 0, d, HEAD_DIM)
    elif head < HEADS + KEY_HEADS:
        own = head - HEADS
        x = _head(
            key_ptr, key_bias_ptr, key_weight_ptr, cos_ptr, sin_ptr, token, own, d,
            key_parts, key_part, key_row, key_head, key_epsilon,
            dtype, HEAD_DIM, TURNED, TABLE, KEY_ROUNDS, IS_LATE,
        )  # fmt: skip
        _store(x, new_keys_ptr, None, (token * KEY_HEADS + own) * HEAD_DIM, 0, d, HEAD_DIM)
        if keys_ptr is not None:
            block, place = tl.load(blocks_ptr + token), tl.load(offsets_ptr + token)
            at = block * block_stride + own * head_stride + place * HEAD_DIM
            scale_at = block * scale_block_stride + own * scale_head_stride + place
            _store(x, keys_ptr, key_scales_ptr, at, scale_at, d, HEAD_DIM)
    else:
        own = head - HEADS - KEY_HEADS
        x = _head(
            value_ptr, value_bias_ptr, None, None, None, token, own, e,
            value_parts, value_part, value_row, value_head, 0.0,
            dtype, VALUE_DIM, 0, 1, False, False,
        )  # fmt: skip
        _store(x, new_values_ptr, None, (token * KEY_HEADS + own) * VALUE_DIM, 0, e, VALUE_DIM)
        if values_ptr is not None:
            block, place = tl.load(blocks_ptr + token), tl.load(offsets_ptr + token)
            at = block * value_block_stride + own * value_head_stride + place * VALUE_DIM
            scale_at = block * scale_block_stride + own * scale_head_stride + place
            _store(x, values_ptr, value_scales_ptr, at, scale_at, e, VALUE_DIM)
