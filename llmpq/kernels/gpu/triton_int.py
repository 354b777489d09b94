"""A weight-only Triton backend for 3, 4 and 8 bits; the only 3-bit backend on a GPU.

Rows are multiplied on tensor cores, with the inputs split among programs where rows and outputs
make few of them, and many rows by dequantizing the weight once and calling the library's matmul.
The kernels and their layout are in ``triton_kernels``, imported when first needed.

Shape legend: M rows of x, N output features, K input features, G groups of a row, b bits, S
segments of a row, J = K / S.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from llmpq.kernels.base import (
    SCALE_DTYPES,
    Capability,
    KernelBackend,
    PackedWeight,
    PreparedWeight,
    ProductParts,
    numbered,
    row_blocks,
)
from llmpq.spec.precision import Precision

MANY_ROWS = 512
"""Number of rows from which the weight is dequantized first. Estimated, not yet measured:
``scripts/gpu_check`` times every algorithm at every number of rows."""

_FEW_ROWS = _LEAST_BYTES = 16  # the smallest tile that tensor cores take
_PROGRAMS_A_PROCESSOR = 4  # enough in flight to hide the latency of memory
_SUM_BLOCK = 1024
_TRIAL = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiles:
    """What a kernel is compiled for: rows, outputs and bytes of a plane a program takes at once."""

    rows: int
    outputs: int
    bytes: int
    warps: int
    stages: int


class TritonIntBackend(KernelBackend):
    """Weight-only multiplication by 3-, 4- and 8-bit codes that stay packed in memory.

    Args:
        device_type: where it runs: ``cuda``; or ``cpu``, in Triton's interpreter and for tests.
    """

    name = "triton_int"
    reads_rows = True

    def __init__(self, device_type: str = "cuda") -> None:
        self.capability = Capability(
            device_types=(device_type,),
            bits=(3, 4, 8),
            dtypes=SCALE_DTYPES,
            default_dtypes=SCALE_DTYPES,
            shapes="K a multiple of 8 (3 bits) or 2 (4 bits), any group that divides it, with or "
            "without zeros; triton and a C compiler at hand",
            stored="exactly linear_bytes, 3 bits included; calls with many rows make the weight "
            "once in x's dtype for as long as the call takes",
            cost="reads b/16 of a 16-bit weight for few rows; from 512 rows on a bf16 matmul and "
            "one write of the weight. Rounds no activation. Not yet measured on a GPU",
        )

    def fits(self, precision: Precision, out_features: int, in_features: int) -> bool:
        """Return whether K is a multiple of the segments."""
        del out_features
        return in_features % segments(precision.bits) == 0

    def runs_on(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether a kernel can be launched on the device."""
        return launch_failure(device, dtype) is None

    def layout(self, packed: PackedWeight) -> tuple[Tensor, ...]:
        """Return the tensors of ``packed`` as ``linear`` reads them."""
        bits = packed.precision.bits
        planes = torch.empty(
            (packed.out_features, packed.in_features * bits // 8),
            dtype=torch.uint8,
            device=packed.codes.device,
        )
        for rows in row_blocks(packed.out_features, packed.in_features):
            planes[rows] = to_planes(packed.signed_rows(rows), bits)
        zeros = () if packed.zeros is None else (packed.zeros.t().contiguous(),)
        return (planes, packed.scales.t().contiguous(), *zeros)

    def rows(self, weight: PreparedWeight, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows of a weight; see ``KernelBackend``."""
        flat = ids.reshape(-1)
        planes, *affine = weight.tensors  # [N, K b / 8], [G, N]
        chosen = replace(
            weight,
            out_features=len(flat),
            tensors=(planes[flat], *(one[:, flat].contiguous() for one in affine)),
        )
        return dequantize(chosen, dtype).view(*ids.shape, weight.in_features)

    def linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias``; x has the dtype and the device of the scales."""
        rows = x.reshape(-1, weight.in_features)
        if rows.shape[0] >= MANY_ROWS:
            return F.linear(x, dequantize(weight, x.dtype), bias)
        y = multiply(rows.contiguous(), weight, bias)
        return y.view(*x.shape[:-1], weight.out_features)

    def parts(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> ProductParts:
        """Return parts of the inputs, not yet summed; see ``KernelBackend``."""
        if not 0 < x.shape[0] < MANY_ROWS:
            return super().parts(x, weight, bias)
        return multiply_parts(x, weight, bias)

    def joined(self, weights: Sequence[PreparedWeight]) -> PreparedWeight:
        """Return one weight with the outputs of several; see ``KernelBackend``."""
        return joined_rows(weights)


def segments(bits: int) -> int:
    """Return the number of segments of a row (``triton_kernels``); K must be a multiple of it."""
    return 8 if bits == 3 else 8 // bits


def to_planes(codes: Tensor, bits: int) -> Tensor:
    """Order signed codes ``[N, K]``, int8, into planes ``[N, K b / 8]``, uint8."""
    unsigned = codes.add(1 << (bits - 1)).view(torch.uint8)
    if bits == 8:
        return unsigned
    parts = unsigned.view(codes.shape[0], segments(bits), -1).unbind(1)  # S of [N, J]
    if bits == 4:
        return parts[0] | (parts[1] << 4)
    low, middle, high = (torch.zeros_like(parts[0]) for _ in range(3))
    for s in range(4):
        low |= (parts[s] & 3) << (2 * s)
        middle |= (parts[s + 4] & 3) << (2 * s)
    for s in range(8):
        high |= (parts[s] >> 2) << s
    return torch.cat((low, middle, high), dim=1)


def dequantize(weight: PreparedWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight ``[N, K]``, rounded once from float32 to ``dtype``."""
    planes, *_ = weight.tensors
    shape = (weight.out_features, weight.in_features)
    out = torch.empty(shape, dtype=dtype, device=planes.device)
    outputs, block = 16, 128
    width = weight.in_features // segments(weight.precision.bits)
    grid = (math.ceil(weight.out_features / outputs), math.ceil(width / block))
    with current_device_of(planes):
        kernels().dequantize_kernel[grid](
            *_pointers(weight), out, *shape, width, weight.precision.bits, _group(weight),
            outputs, block,
        )  # fmt: skip
    return out


def multiply(x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
    """Return ``x @ weight.T + bias`` without dequantizing the weight in memory.

    Args:
        x: ``[M, K]``, contiguous.
        weight: prepared by ``TritonIntBackend``.
        bias: ``[N]`` or ``None``.
    """
    rows, outputs = x.shape[0], weight.out_features
    if rows == 0:
        return x.new_empty((0, outputs))
    made = multiply_parts(x, weight, bias)
    if len(made.values) == 1:
        return made.values[0]
    y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    with current_device_of(x):
        kernels().sum_parts_kernel[(math.ceil(y.numel() / _SUM_BLOCK),)](
            made.values, bias, y, y.numel(), outputs, len(made.values), _SUM_BLOCK
        )
    return y


def multiply_parts(x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> ProductParts:
    """Return the same for one row or more; several parts are float32, and lack the bias."""
    rows, outputs = x.shape[0], weight.out_features
    tiles = _tiles(rows, weight, x.dtype)
    blocks = (math.ceil(rows / tiles.rows), math.ceil(outputs / tiles.outputs))
    steps = math.ceil(weight.in_features // segments(weight.precision.bits) / tiles.bytes)
    parts, steps_a_part = _split(steps, blocks[0] * blocks[1], x.device)
    dtype, own = (x.dtype, bias) if parts == 1 else (torch.float32, None)
    values = torch.empty((parts, rows, outputs), dtype=dtype, device=x.device)
    _launch(x, weight, own, values, tiles, (*blocks, parts), steps_a_part)
    return ProductParts(values=values, bias=bias if own is None else None)


def joined_rows(weights: Sequence[PreparedWeight]) -> PreparedWeight:
    """Return one weight with the outputs of several, of codes ``[N, ...]`` and ``[G, N, ...]``."""
    codes, *affine = zip(*(weight.tensors for weight in weights), strict=True)
    return replace(
        weights[0],
        out_features=sum(weight.out_features for weight in weights),
        tensors=(torch.cat(codes), *(torch.cat(one, dim=1) for one in affine)),
    )


def _launch(
    x: Tensor,
    weight: PreparedWeight,
    bias: Tensor | None,
    target: Tensor,
    tiles: _Tiles,
    grid: tuple[int, int, int],
    steps: int,
) -> None:
    bits, group = weight.precision.bits, _group(weight)
    width = weight.in_features // segments(bits)
    in_group = not group or (width % tiles.bytes == 0 and group % tiles.bytes == 0)
    # The interpreter multiplies the bits of bf16 numbers as if they were integers.
    in_float32 = x.device.type == "cpu"
    with current_device_of(x):
        kernels().matrix_kernel[grid](
            x, *_pointers(weight), bias, target,
            x.shape[0], weight.out_features, weight.in_features, width, steps,
            bits, group, in_group, in_float32, tiles.rows, tiles.outputs, tiles.bytes,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip


@lru_cache(maxsize=8)
def why_missing(package: str) -> str | None:
    """Return why ``package`` cannot be used, or ``None`` when it can; imports it to find out."""
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    try:
        importlib.import_module(package)
    except Exception as error:  # native libraries fail in ways of their own (OSError, RuntimeError)
        return f"{package} cannot be imported: {type(error).__name__}: {error}"
    return None


def launch_failure(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why no kernel runs on ``device`` in ``dtype``, or ``None`` when one does.

    Triton needs a recent GPU and a C compiler; one trial product shows whether both are present. A
    GPU without a number is the current one of this thread. Threads wait for each other: the trial
    compiles a kernel, which takes some seconds the first time.
    """
    missing = why_missing("triton")
    if missing is not None:
        return missing
    if device.type == "cuda" and not torch.cuda.is_available():
        return "no CUDA device"
    if device.type == "cpu" and not _is_interpreted():
        return "triton is not interpreting (TRITON_INTERPRET=1)"
    with _TRIAL:
        return _try_once(numbered(device), dtype)


@lru_cache(maxsize=32)
def _try_once(device: torch.device, dtype: torch.dtype) -> str | None:
    codes = torch.zeros((16, 8), dtype=torch.int8, device=device).add_(2)  # [N, K], weight 2 each
    weight = PreparedWeight(
        backend=TritonIntBackend.name,
        out_features=16,
        in_features=8,
        precision=Precision(bits=3, group_size=None, symmetric=True),
        tensors=(to_planes(codes, 3), torch.ones((1, 16), dtype=dtype, device=device)),
    )
    try:
        for rows in (1, 2):
            y = multiply(torch.ones((rows, 8), dtype=dtype, device=device), weight, None)
            if not bool((y == 16).all()):
                return f"a trial product of ones and twos came out as {y.flatten()[:4].tolist()}"
    except Exception as error:  # compilers and drivers fail in more ways than can be listed
        return f"{type(error).__name__}: {error}"
    return None


def _is_interpreted() -> bool:
    # Triton reads TRITON_INTERPRET when it is imported; the type of a kernel shows the result.
    return type(kernels().matrix_kernel).__name__ == "InterpretedFunction"


def current_device_of(tensor: Tensor) -> AbstractContextManager[None]:
    """Make the GPU of ``tensor`` the current device, on which Triton launches."""
    device: AbstractContextManager[None] = torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]
    return device


def kernels() -> Any:
    """Return the module of kernels; importing it imports triton."""
    from llmpq.kernels.gpu import triton_kernels

    return triton_kernels


def _pointers(weight: PreparedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    codes, scales, *zeros = weight.tensors
    return codes, scales, zeros[0] if zeros else None


def _group(weight: PreparedWeight) -> int:
    """Return the inputs that share a scale, 0 for all of a row."""
    group = weight.precision.effective_group(weight.in_features)
    return 0 if group == weight.in_features else group


def _tiles(rows: int, weight: PreparedWeight, dtype: torch.dtype) -> _Tiles:
    """Return the tiles for ``rows`` rows; sized to fit 100 KiB of shared memory at two stages.

    A tile has fewer bytes where that puts it into one group.
    """
    bits, group = weight.precision.bits, _group(weight)
    most = {3: 32, 4: 128, 8: 128}[bits]
    if rows <= _FEW_ROWS:
        tiles = _Tiles(rows=_FEW_ROWS, outputs=64, bytes=most, warps=4, stages=3)
    elif dtype == torch.float32:  # exact products run outside tensor cores, from registers
        tiles = _Tiles(rows=32, outputs=64, bytes=most // 2, warps=4, stages=2)
    else:  # as many as the registers of a thread hold
        most = most if bits != 4 or weight.precision.symmetric else most // 2
        rows = 32 if bits == 3 else 64
        tiles = _Tiles(rows=rows, outputs=128, bytes=most, warps=8, stages=2)
    common = math.gcd(group, weight.in_features // segments(bits)) if group else 0
    within = common & -common  # the largest power of two that divides both
    return replace(tiles, bytes=within) if _LEAST_BYTES <= within < tiles.bytes else tiles


def _split(steps: int, programs: int, device: torch.device) -> tuple[int, int]:
    """Return into how many parts the inputs are split, and the steps of each."""
    wanted = _PROGRAMS_A_PROCESSOR * _processors(device) // programs
    steps_a_part = math.ceil(steps / max(1, min(steps, wanted)))
    return math.ceil(steps / steps_a_part), steps_a_part


@lru_cache(maxsize=32)
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # so that the interpreter splits too
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
