"""Triton kernels that multiply by 3- and 4-bit weights, and the layout they read.

Importing this module imports triton, so only ``triton_int`` does, and only where it is installed.
What stands in a jitted function is Triton's language, compiled for the GPU, and not Python.

The layout, a row of the weight at a time: its K inputs are cut into S equal segments, S = 2 for 4
bits and S = 8 for 3. Byte ``j`` of a plane belongs to the j-th code of every segment, so that one
tile of bytes yields S tiles of the row, each contiguous, and no code ever crosses a byte:

- 4 bits, one plane of K/2 bytes: segment 0 in the low half of a byte, segment 1 in the high one.
- 3 bits, three planes of K/8 bytes: the low two bits of segments 0 to 3, those of segments 4 to 7,
  and the high bits of all eight. Three bytes for eight codes: 3 bits a weight and nothing more.

Scales and zeros are ``[G, N]``, for a tile reads one group of many rows. Weights become floats as
``(code - 2^(b-1)) * scale + zero`` in float32, rounded once to the dtype of x, as the reference's.

Shape legend: M rows of x, N outputs, K inputs, G groups of a row, J = K / S bytes of a plane, P
parts that the inputs are split into. Arguments in capitals other than M, N and K are known when
a kernel is compiled, bounds of loops included: the interpreter accepts no others.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _code(low, middle, high, s: tl.constexpr, BITS: tl.constexpr):
    """Return the codes of segment ``s`` in a tile of bytes: ``[N, J]``."""
    if BITS == 4:
        code = (low >> (4 * s)) & 15
    elif s < 4:
        code = ((low >> (2 * s)) & 3) | (((high >> s) & 1) << 2)
    else:
        code = ((middle >> (2 * (s - 4))) & 3) | (((high >> s) & 1) << 2)
    return code


@triton.jit
def _planes(codes_ptr, n, j, N, J, BITS: tl.constexpr):
    """Return the bytes ``[N, J]`` of a tile, a plane after the other; 4 bits have one thrice."""
    row_bytes = J if BITS == 4 else 3 * J
    inside = (n < N)[:, None] & (j < J)[None, :]
    # 64 bits: the offsets of a large weight pass 2^31.
    tile = codes_ptr + n.to(tl.int64)[:, None] * row_bytes + j[None, :]
    low = tl.load(tile, mask=inside, other=0)
    middle = low
    high = low
    if BITS == 3:
        middle = tl.load(tile + J, mask=inside, other=0)
        high = tl.load(tile + 2 * J, mask=inside, other=0)
    return low, middle, high


@triton.jit
def _affine(table_ptr, n, first, k, N, K, group_size, TILE_IN_GROUP: tl.constexpr):
    """Return the scales or zeros of inputs ``k``, from ``first`` on: float32 ``[N, J or 1]``."""
    if TILE_IN_GROUP:
        # The last part may have tiles past the end, whose group does not exist. A tensor on both
        # sides: Triton's interpreter makes an integer of ``first < K``, which is no mask.
        row = table_ptr + (first // group_size) * N
        inside = (n < N) & (first + tl.zeros_like(n) < K)
        values = tl.load(row + n, mask=inside, other=0.0)[:, None]
    else:
        inside = (n < N)[:, None] & (k < K)[None, :]
        rows = table_ptr + (k // group_size)[None, :] * N
        values = tl.load(rows + n[:, None], mask=inside, other=0.0)
    return values.to(tl.float32)


@triton.jit
def _weight(
    code, scales_ptr, zeros_ptr, n, first, k, N, K, group_size,
    BITS: tl.constexpr, TILE_IN_GROUP: tl.constexpr,
):  # fmt: skip
    """Return the float32 weights ``[N, J]`` of inputs ``k``, which begin at ``first``."""
    scale = _affine(scales_ptr, n, first, k, N, K, group_size, TILE_IN_GROUP)
    weight = (code.to(tl.float32) - (1 << (BITS - 1))) * scale
    if zeros_ptr is not None:
        weight += _affine(zeros_ptr, n, first, k, N, K, group_size, TILE_IN_GROUP)
    return weight


@triton.jit
def dequantize_kernel(
    codes_ptr, scales_ptr, zeros_ptr, out_ptr, N, K, group_size,
    BITS: tl.constexpr, TILE_IN_GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Write the weight ``[N, K]`` in the dtype of ``out``; one program a tile of bytes."""
    SEGMENTS: tl.constexpr = 2 if BITS == 4 else 8
    J = K // SEGMENTS
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(1) * BLOCK_J
    j = start + tl.arange(0, BLOCK_J)
    low, middle, high = _planes(codes_ptr, n, j, N, J, BITS)
    inside = (n < N)[:, None] & (j < J)[None, :]
    for s in tl.static_range(SEGMENTS):
        k = s * J + j
        code = _code(low, middle, high, s, BITS)
        weight = _weight(
            code, scales_ptr, zeros_ptr, n, s * J + start, k, N, K, group_size,
            BITS, TILE_IN_GROUP,
        )  # fmt: skip
        place = out_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
        tl.store(place, weight.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def vector_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, bias_ptr, y_ptr, N, K, group_size,
    STEPS: tl.constexpr, BITS: tl.constexpr, TILE_IN_GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Multiply one row: sums ``[P, N]`` in y's dtype; program (n, p) reads its part of K.

    Bound by reading the codes: no tensor cores, products are summed across lanes once at the end.
    A bias comes only with a single part, here and below.
    """
    SEGMENTS: tl.constexpr = 2 if BITS == 4 else 8
    J = K // SEGMENTS
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    total = tl.zeros((BLOCK_N, BLOCK_J), dtype=tl.float32)
    for step in range(STEPS):
        start = (part * STEPS + step) * BLOCK_J
        j = start + tl.arange(0, BLOCK_J)
        low, middle, high = _planes(codes_ptr, n, j, N, J, BITS)
        for s in tl.static_range(SEGMENTS):
            k = s * J + j
            code = _code(low, middle, high, s, BITS)
            weight = _weight(
                code, scales_ptr, zeros_ptr, n, s * J + start, k, N, K, group_size,
                BITS, TILE_IN_GROUP,
            )  # fmt: skip
            x = tl.load(x_ptr + k, mask=j < J, other=0.0)
            total += weight.to(x.dtype).to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(total, axis=1)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + part * N + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def matrix_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, bias_ptr, y_ptr, M, N, K, group_size,
    STEPS: tl.constexpr, BITS: tl.constexpr, TILE_IN_GROUP: tl.constexpr, IN_FLOAT32: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Multiply rows on tensor cores: sums ``[P, M, N]`` in y's dtype; programs (m, n, p).

    Computes the transpose, weight times x, because Hopper's tensor cores read their left operand
    from registers, where the weight has just been made, and their right one from shared memory.
    """
    SEGMENTS: tl.constexpr = 2 if BITS == 4 else 8
    J = K // SEGMENTS
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for step in range(STEPS):
        start = (part * STEPS + step) * BLOCK_J
        j = start + tl.arange(0, BLOCK_J)
        low, middle, high = _planes(codes_ptr, n, j, N, J, BITS)
        inside = (j < J)[:, None] & (m < M)[None, :]
        for s in tl.static_range(SEGMENTS):
            k = s * J + j
            code = _code(low, middle, high, s, BITS)
            weight = _weight(
                code, scales_ptr, zeros_ptr, n, s * J + start, k, N, K, group_size,
                BITS, TILE_IN_GROUP,
            )  # fmt: skip
            x = tl.load(
                x_ptr + m.to(tl.int64)[None, :] * K + k[:, None], mask=inside, other=0.0
            )  # [J, M]
            weight = weight.to(x.dtype)
            if IN_FLOAT32:
                weight = weight.to(tl.float32)
                x = x.to(tl.float32)
            total = tl.dot(weight, x, total, input_precision="ieee")
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    place = y_ptr + (part.to(tl.int64) * M + m.to(tl.int64)[None, :]) * N + n[:, None]
    inside = (n < N)[:, None] & (m < M)[None, :]
    tl.store(place, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def sum_parts_kernel(parts_ptr, bias_ptr, y_ptr, size, N, P: tl.constexpr, BLOCK: tl.constexpr):
    """Sum ``[P, size]`` in order, so that equal calls give equal bits; add the bias; round once."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in range(P):
        total += tl.load(parts_ptr + part * size + at, mask=inside, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + at % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def read_int4pack_kernel(
    words_ptr, affine_ptr, out_ptr, N, K, group_size,
    INNER_TILES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the weight ``[N, K]`` that torch packed for its own 4-bit kernel on CUDA.

    That layout is ``[N / 8, K / (16 T), 32, T / 2]`` words of eight codes, T inner tiles of 16
    inputs: lane ``4 (n mod 8) + (k mod 8) / 2`` holds, of two tiles, the inputs in which only bits
    0, 3 and 4 of ``k`` differ, and of those the even inputs in the word's lower half.

    Args:
        words_ptr: int32, as above.
        affine_ptr: scale and zero side by side, ``[G, N, 2]``.
        out_ptr: where to.
        N: outputs, a multiple of 8.
        K: inputs, a multiple of 16 T.
        group_size: inputs that share a scale.
        INNER_TILES: T.
        BLOCK_N: outputs a program.
        BLOCK_K: inputs a program.
    """
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    k = (tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    inside = (n < N) & (k < K)
    outer = (n // 8).to(tl.int64) * (K // (16 * INNER_TILES)) + k // (16 * INNER_TILES)
    lane = (n % 8) * 4 + (k % 8) // 2
    word = (outer * 32 + lane) * (INNER_TILES // 2) + (k // 32) % (INNER_TILES // 2)
    shift = (k % 2) * 16 + ((k // 8) % 4) * 4
    code = (tl.load(words_ptr + word, mask=inside, other=0) >> shift) & 15
    row = affine_ptr + ((k // group_size) * N + n) * 2
    scale = tl.load(row, mask=inside, other=0.0).to(tl.float32)
    zero = tl.load(row + 1, mask=inside, other=0.0).to(tl.float32)
    weight = (code.to(tl.float32) - 8) * scale + zero
    place = out_ptr + n.to(tl.int64) * K + k
    tl.store(place, weight.to(out_ptr.dtype.element_ty), mask=inside)
