"""Triton kernels that multiply by 3-, 4- and 8-bit weights, and the layout they read.

Importing this module imports triton, so only ``triton_int`` does, and only where it is installed.
What stands in a jitted function is Triton's language, compiled for the GPU, and not Python.

The layout, a row of the weight at a time: its K inputs are cut into S equal segments, S = 1 for 8
bits, 2 for 4 and 8 for 3. Byte ``j`` of a plane belongs to the j-th code of every segment, so that
one tile of bytes yields S tiles of the row, each contiguous, and no code ever crosses a byte:

- 8 bits, one plane of K bytes.
- 4 bits, one plane of K/2 bytes: segment 0 in the low half of a byte, segment 1 in the high one.
- 3 bits, three planes of K/8 bytes: the low two bits of segments 0 to 3, those of segments 4 to 7,
  and the high bits of all eight. Three bytes for eight codes: 3 bits a weight and nothing more.

Scales and zeros are ``[G, N]``, for a tile reads one group of many rows. A weight is
``(code - 2^(b-1)) * scale + zero``. Where a tile of inputs lies in one group, the codes themselves
are multiplied, as exact floats, and their sums are scaled in float32: few instructions a weight,
and no weight is rounded. Elsewhere weights are made in float32 and rounded once to the dtype of x,
as the reference's.

Shape legend: M rows of x, N outputs, K inputs, G groups of a row, J = K / S bytes of a plane, P
parts that the inputs are split into. Arguments in capitals other than M, N, K and J are known when
a kernel is compiled; ``GROUP`` is the size of a group, 0 for one group a row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _code(low, middle, high, s: tl.constexpr, BITS: tl.constexpr, MARK: tl.constexpr):
    """Return the codes of segment ``s`` in a tile of bytes, and the bits ``MARK``: ``[N, J]``."""
    if BITS == 8:
        code = low | MARK
    elif BITS == 4:
        code = ((low >> (4 * s)) & 15) | MARK
    else:
        pair = low if s < 4 else middle
        third = (high << (2 - s)) if s < 2 else (high >> (s - 2))
        code = (((pair >> (2 * (s % 4))) & 3) | MARK) | (third & 4)
    return code


@triton.jit
def _exact(
    low, middle, high, s: tl.constexpr,
    BITS: tl.constexpr, dtype: tl.constexpr, IN_FLOAT32: tl.constexpr,
):  # fmt: skip
    """Return the codes of segment ``s``, less ``2^(b-1)``, in a dtype: ``[N, J]``, all exact.

    The bits of a code behind those of 128, 1024 or 2^23 are the number that is so much larger. In
    bfloat16 this holds below 128 only: 8 bits take the way of float32.
    """
    in_half: tl.constexpr = dtype == tl.float16
    in_brain: tl.constexpr = dtype == tl.bfloat16 and BITS < 8
    MARK: tl.constexpr = 0x6400 if in_half else (0x4300 if in_brain else 0x4B000000)
    LARGER: tl.constexpr = 1024.0 if in_half else (128.0 if in_brain else 8388608.0)
    code = _code(low, middle, high, s, BITS, MARK)
    if in_half or in_brain:
        marked = code.to(tl.int16).to(dtype, bitcast=True)
    else:
        marked = code.to(tl.float32, bitcast=True)
    if IN_FLOAT32:
        marked = marked.to(tl.float32)
    value = marked - (LARGER + (1 << (BITS - 1)))
    return value if IN_FLOAT32 else value.to(dtype)


@triton.jit
def _planes(codes_ptr, n, j, N, J, BITS: tl.constexpr, WIDE: tl.constexpr):
    """Return the bytes ``[N, J]`` of a tile in ``WIDE``, a plane after the other.

    4 and 8 bits have one, thrice.
    """
    row_bytes = 3 * J if BITS == 3 else J
    inside = (n < N)[:, None] & (j < J)[None, :]
    # 64 bits: the offsets of a large weight pass 2^31.
    tile = codes_ptr + n.to(tl.int64)[:, None] * row_bytes + j[None, :]
    low = tl.load(tile, mask=inside, other=0).to(WIDE)
    middle = low
    high = low
    if BITS == 3:
        middle = tl.load(tile + J, mask=inside, other=0).to(WIDE)
        high = tl.load(tile + 2 * J, mask=inside, other=0).to(WIDE)
    return low, middle, high


@triton.jit
def _of_group(table_ptr, n, first, N, K, GROUP: tl.constexpr):
    """Return the scales or zeros of the group of input ``first``: float32 ``[N]``."""
    if GROUP == 0:
        values = tl.load(table_ptr + n, mask=n < N, other=0.0)
    else:
        # The last part may have tiles past the end, whose group does not exist. A tensor on both
        # sides: Triton's interpreter makes an integer of ``first < K``, which is no mask.
        inside = (n < N) & (first + tl.zeros_like(n) < K)
        values = tl.load(table_ptr + (first // GROUP) * N + n, mask=inside, other=0.0)
    return values.to(tl.float32)


@triton.jit
def _affine(table_ptr, n, k, N, K, GROUP: tl.constexpr):
    """Return the scales or zeros of inputs ``k``: float32 ``[N, J]``, or ``[N, 1]``."""
    if GROUP == 0:
        values = tl.load(table_ptr + n, mask=n < N, other=0.0)[:, None]
    else:
        inside = (n < N)[:, None] & (k < K)[None, :]
        rows = table_ptr + (k // GROUP)[None, :] * N
        values = tl.load(rows + n[:, None], mask=inside, other=0.0)
    return values.to(tl.float32)


@triton.jit
def _weight(value, scales_ptr, zeros_ptr, n, k, N, K, GROUP: tl.constexpr):
    """Return the float32 weights ``[N, J]`` of inputs ``k``, whose codes are ``value``."""
    weight = value * _affine(scales_ptr, n, k, N, K, GROUP)
    if zeros_ptr is not None:
        weight += _affine(zeros_ptr, n, k, N, K, GROUP)
    return weight


@triton.jit
def dequantize_kernel(
    codes_ptr, scales_ptr, zeros_ptr, out_ptr, N, K, J,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Write the weight ``[N, K]`` in the dtype of ``out``; one program a tile of bytes."""
    SEGMENTS: tl.constexpr = 8 if BITS == 3 else 8 // BITS
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    low, middle, high = _planes(codes_ptr, n, j, N, J, BITS, tl.int32)
    inside = (n < N)[:, None] & (j < J)[None, :]
    for s in tl.static_range(SEGMENTS):
        k = s * J + j
        value = _exact(low, middle, high, s, BITS, tl.float32, True)
        weight = _weight(value, scales_ptr, zeros_ptr, n, k, N, K, GROUP)
        place = out_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
        tl.store(place, weight.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "steps"])
def matrix_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, bias_ptr, y_ptr, M, N, K, J, steps,
    BITS: tl.constexpr, GROUP: tl.constexpr, TILE_IN_GROUP: tl.constexpr, IN_FLOAT32: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Multiply rows on tensor cores: sums ``[P, M, N]`` in y's dtype; programs (m, n, p).

    Computes the transpose, weight times x, because Hopper's tensor cores read their left operand
    from registers, where the codes have just been made, and their right one from shared memory. A
    bias comes only with a single part. Numbers of rows and of steps are not compiled in: none of
    them makes a server wait for the compiler.
    """
    SEGMENTS: tl.constexpr = 8 if BITS == 3 else 8 // BITS
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    is_short: tl.constexpr = dtype == tl.float16 or (dtype == tl.bfloat16 and BITS < 8)
    WIDE: tl.constexpr = tl.int16 if is_short else tl.int32
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for step in range(steps):
        start = (part * steps + step) * BLOCK_J
        j = start + tl.arange(0, BLOCK_J)
        low, middle, high = _planes(codes_ptr, n, j, N, J, BITS, WIDE)
        inside = (j < J)[:, None] & (m < M)[None, :]
        for s in tl.static_range(SEGMENTS):
            k = s * J + j
            x = tl.load(
                x_ptr + m.to(tl.int64)[None, :] * K + k[:, None], mask=inside, other=0.0
            )  # [J, M]
            if TILE_IN_GROUP:
                value = _exact(low, middle, high, s, BITS, dtype, IN_FLOAT32)
                if IN_FLOAT32:
                    x = x.to(tl.float32)
                first = s * J + start
                scale = _of_group(scales_ptr, n, first, N, K, GROUP)
                total += tl.dot(value, x, input_precision="ieee") * scale[:, None]
                if zeros_ptr is not None:
                    zero = _of_group(zeros_ptr, n, first, N, K, GROUP)
                    total += zero[:, None] * tl.sum(x.to(tl.float32), axis=0)[None, :]
            else:
                value = _exact(low, middle, high, s, BITS, dtype, True)
                weight = _weight(value, scales_ptr, zeros_ptr, n, k, N, K, GROUP).to(dtype)
                if IN_FLOAT32:
                    weight = weight.to(tl.float32)
                    x = x.to(tl.float32)
                total = tl.dot(weight, x, total, input_precision="ieee")
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    place = y_ptr + (part.to(tl.int64) * M + m.to(tl.int64)[None, :]) * N + n[:, None]
    inside = (n < N)[:, None] & (m < M)[None, :]
    tl.store(place, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["parts"])
def sum_parts_kernel(parts_ptr, bias_ptr, y_ptr, size, N, parts, BLOCK: tl.constexpr):
    """Sum ``[parts, size]`` in order, so that equal calls give equal bits; add the bias; round."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in range(parts):
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
