"""Round-to-nearest: the quantizer that needs no calibration data.

Scales and zeros are first rounded to the dtype they are stored in, so that the grid still covers
the group. Codes are the nearest points of the stored grid: the error of a weight is at most half a
step, at any storage dtype.

Shape legend: N output features, K input features, G groups of a row, b bits, R rows of a block.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from llmpq.errors import SpecError
from llmpq.kernels.base import PackedWeight, pack_codes, packed_row_bytes, row_blocks
from llmpq.kernels.cpu.native import DONE, TYPES, Rounding, library
from llmpq.spec.precision import Precision

_LANES = 16
_BITS_OF_DTYPE = {2: torch.int16, 4: torch.int32}


def quantize(
    weight: Tensor, precision: Precision, scale_dtype: torch.dtype, room: Tensor | None = None
) -> PackedWeight:
    """Quantize a weight by the method of its precision, which is ``rtn``.

    Args:
        weight: ``[N, K]``, any floating dtype; read only.
        precision: 3, 4 or 8 bits.
        scale_dtype: dtype of the run, in which scales and zeros are stored.
        room: uint8 memory for the codes, ``None`` for new memory.

    Raises:
        SpecError: another method (16 bits has none), or as :func:`round_to_nearest`.
    """
    if precision.method != "rtn":
        raise SpecError(f"quantize: found precision {precision}, expected a method of ['rtn']")
    return round_to_nearest(weight, precision, scale_dtype, room)


def round_to_nearest(
    weight: Tensor, precision: Precision, scale_dtype: torch.dtype, room: Tensor | None = None
) -> PackedWeight:
    """Quantize ``weight`` ``[N, K]``, each group on its own.

    Uses the compiled kernel if possible; otherwise torch, a block of rows at a time, so that no
    float32 copy of the matrix is made.

    Args:
        weight: any floating dtype; read only.
        precision: 3, 4 or 8 bits; symmetric or min-max.
        scale_dtype: the run's dtype, in which scales and zeros are stored.
        room: uint8 memory for the codes, ``None`` for new memory.

    Raises:
        SpecError: the weight holds a NaN or an infinity, or its scales overflow ``scale_dtype``.
    """
    rows, columns = weight.shape
    group = precision.effective_group(columns)
    shape, device = (rows, columns // group), weight.device
    row_bytes = packed_row_bytes(columns, precision.bits)
    if room is None:
        room = torch.empty(rows * row_bytes, dtype=torch.uint8, device=device)
    codes = room[: rows * row_bytes].view(rows, row_bytes)
    scales = torch.empty(shape, dtype=scale_dtype, device=device)
    zeros = None if precision.symmetric else torch.empty_like(scales)
    packed = PackedWeight(
        out_features=rows,
        in_features=columns,
        precision=precision,
        codes=codes,
        scales=scales,
        zeros=zeros,
    )
    if not (_can_compile(weight, group) and _rounded_compiled(weight, packed)):
        _rounded_by_torch(weight, packed)
    return packed


def _can_compile(weight: Tensor, group: int) -> bool:
    is_plain = weight.device.type == "cpu" and weight.is_contiguous() and weight.dtype in TYPES
    return is_plain and group % _LANES == 0 and library() is not None


def _rounded_compiled(weight: Tensor, packed: PackedWeight) -> bool:
    """Fill ``packed`` in one pass; ``False`` for weights that the torch version rejects.

    Gives the same bits as torch's operators, ten times as fast and without their temporaries.
    """
    loaded = library()
    assert loaded is not None
    call = Rounding(
        weight=weight.data_ptr(),
        codes=packed.codes.data_ptr(),
        scales=packed.scales.data_ptr(),
        zeros=None if packed.zeros is None else packed.zeros.data_ptr(),
        rows=packed.out_features,
        columns=packed.in_features,
        group=packed.group_size,
        bits=packed.precision.bits,
        type=TYPES[weight.dtype],
        scale_type=TYPES[packed.dtype],
        threads=torch.get_num_threads(),
    )
    return int(loaded.kernels_round(byref(call))) == DONE


def _rounded_by_torch(weight: Tensor, packed: PackedWeight) -> None:
    precision, columns = packed.precision, packed.in_features
    for block in row_blocks(*weight.shape):
        wide = weight[block].to(torch.float32)
        grouped = wide.reshape(wide.shape[0], -1, packed.group_size)  # [R, G, K/G]
        scale, zero = fit_grid(grouped, precision, packed.dtype)  # [R, G]
        nearest = nearest_codes(grouped, scale, zero, precision.bits)
        packed.codes[block] = pack_codes(nearest.view(-1, columns), precision.bits)
        packed.scales[block] = scale
        if packed.zeros is not None:
            packed.zeros[block] = zero


def fit_grid(
    grouped: Tensor, precision: Precision, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the scale and zero of each group of ``grouped`` ``[R, G, K/G]``, both ``[R, G]``.

    Both are float32 numbers that ``scale_dtype`` represents exactly. Grid points are
    ``(code - 2^(b-1)) * scale + zero``; every weight lies on the grid or within half a step of it.
    A group of equal weights that the zero represents gets the scale 1, never 0.

    Raises:
        SpecError: a weight is not finite, or the grid overflows ``scale_dtype``.
    """
    # Not aminmax: torch runs it in scalar code, twelve times slower than both of these.
    low, high = grouped.amin(dim=-1), grouped.amax(dim=-1)  # [R, G]
    if precision.symmetric:
        zero = torch.zeros_like(low)
        step = torch.maximum(high, -low) / _symmetric_half_width(precision.bits)
    else:
        half = 1 << (precision.bits - 1)
        steps = 2 * half - 1
        # Divided before subtracting: the range of extreme weights overflows float32 itself.
        zero = (low + (high / steps - low / steps) * half).to(scale_dtype).to(torch.float32)
        step = torch.maximum((high - zero) / (half - 1), (zero - low) / half)
    scale = _round_up(step, scale_dtype)
    if not (torch.isfinite(scale).all() and torch.isfinite(zero).all()):
        raise SpecError(
            f"weight: found values in [{low.min().item()}, {high.max().item()}], expected finite "
            f"ones whose scales fit {scale_dtype}"
        )
    return torch.where(scale == 0, 1.0, scale), zero


def nearest_codes(grouped: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Return the codes nearest to ``grouped`` ``[R, G, K/G]`` on the given grid: uint8, same shape.

    Args:
        grouped: float32 weights.
        scale: ``[R, G]``, positive.
        zero: ``[R, G]``.
        bits: b; codes lie in ``[0, 2^b)``.
    """
    half = 1 << (bits - 1)
    steps = (grouped - zero.unsqueeze(-1)).div_(scale.unsqueeze(-1)).round_().add_(half)
    return steps.clamp_(0, 2 * half - 1).to(torch.uint8)


def _symmetric_half_width(bits: int) -> float:
    """Return how many steps the largest weight lies from zero.

    8 bits: 127, as LLM.int8()'s absmax. Fewer bits: half the number of steps, which also uses the
    one code without a negative, as GPTQ does.
    """
    return 127.0 if bits == 8 else (2**bits - 1) / 2


def _round_up(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the smallest number of ``dtype`` not below each of ``values`` (>= 0), as float32."""
    rounded = values.to(dtype)
    # Positive floats are ordered like their bit patterns: the next number is one more.
    as_integers = rounded.view(_BITS_OF_DTYPE[dtype.itemsize])
    too_low = rounded.to(torch.float32) < values
    return (as_integers + too_low.to(as_integers.dtype)).view(dtype).to(torch.float32)
