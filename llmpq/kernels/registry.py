"""The backends by name, and the choice among them.

The choice is made once for each weight, when it is loaded, from device, precision, dtype and shape.
It does not depend on the number of rows: a backend that has several algorithms picks one inside
``linear``. ``ReferenceBackend`` dequantizes, then multiplies: it supports every precision and
device, and tests compare the others with it.

The compiled CPU backends keep a weight in tiles that weigh exactly ``linear_bytes`` and never hold
a dequantized copy of it: weight-only products, and those with activations at 8 bits. They exist
where there is a C compiler, or a wheel that brought the library; elsewhere their ``supports`` says
no and torch's own kernels (``cpu.torch_kernels``) are chosen.

Shape legend: N output features, K input features, G groups of a row.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from llmpq.errors import SpecError
from llmpq.kernels.base import (
    PACKED_BITS,
    SCALE_DTYPES,
    Capability,
    KernelBackend,
    PackedWeight,
    PreparedWeight,
)
from llmpq.kernels.cpu.kernel_choice import gemv_max_rows, is_float_faster
from llmpq.kernels.cpu.native import (
    TiledWeight,
    bf16_product,
    fits_tiles,
    float_product,
    has_bf16_products,
    has_int8,
    instruction_set,
    int8_product,
    library,
    packed_int8_product,
    prepared_tiles,
    rows_of_tiles,
    to_tiles,
)
from llmpq.kernels.cpu.torch_kernels import OUTLIER_THRESHOLD, CpuInt4Backend, CpuInt8Backend
from llmpq.kernels.gpu.cuda import cuda_backends
from llmpq.spec.precision import Precision


class TileBackend(KernelBackend):
    """A backend whose kernels read tiles."""

    reads_rows = True

    def prepare(self, packed: PackedWeight) -> PreparedWeight:
        """Rearrange the codes into tiles."""
        self.check_supported(packed)
        return self.wrap(to_tiles(packed))

    def wrap(self, weight: TiledWeight) -> PreparedWeight:
        """Return a weight in tiles without a copy; ``supports`` must be True for its shape."""
        return prepared_tiles(weight, self.name)

    def rows(self, weight: PreparedWeight, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows of a weight; see ``KernelBackend``."""
        return rows_of_tiles(weight, ids, dtype)


class CpuPackedBackend(TileBackend):
    """Weight-only: codes are decoded in registers or a cache-sized panel, scaled in float32.

    bf16 activations are multiplied as bf16 pairs where the processor can, many rows only where that
    is faster than float32; all others in float32, also float16 ones, for which torch itself has no
    fast matmul on a CPU.
    """

    name = "cpu_packed"
    capability = Capability(
        device_types=("cpu",),
        bits=PACKED_BITS,
        dtypes=SCALE_DTYPES,
        default_dtypes=SCALE_DTYPES,
        shapes="N a multiple of 16, K and groups multiples of 32, a C compiler",
        stored="exactly linear_bytes, and no scratch weight",
        cost="with bf16 products a quarter of a bf16 matmul for one row at 3 and 4 bits, 0.8 of it "
        "for 32 rows and 1.1 times for 512; float32 otherwise. No error beyond that of the codes",
    )

    def fits(self, precision: Precision, out_features: int, in_features: int) -> bool:
        """Return whether the weight is whole tiles, and the library is there."""
        fits = fits_tiles(out_features, in_features, precision.effective_group(in_features))
        return fits and library() is not None

    def wrap(self, weight: TiledWeight) -> PreparedWeight:
        """Return a weight in tiles; the first call on a machine also measures the switch."""
        if weight.dtype == torch.bfloat16 and has_bf16_products():
            gemv_max_rows(weight.precision.bits)
            is_float_faster()
        return super().wrap(weight)

    def linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias``; see ``KernelBackend``."""
        if x.dtype == torch.bfloat16 and has_bf16_products():
            limit = gemv_max_rows(weight.precision.bits)
            return bf16_product(x, weight, bias, limit, in_float=is_float_faster())
        return float_product(x, weight, bias)


class CpuPackedInt8Backend(TileBackend):
    """3- and 4-bit weights, activations rounded to 8 bits in blocks of up to 128 columns.

    llama.cpp rounds them in blocks of 32 (Q8_0). The error is small beside that of the codes
    (``docs/how/quantization.md``), and integer products are two to four times as fast as bf16 ones,
    and as float32 ones on processors without bf16 products. It is the default of 16-bit runs only;
    a float32 run asks for exactness.
    """

    name = "cpu_packed_int8"
    capability = Capability(
        device_types=("cpu",),
        bits=(3, 4),
        dtypes=SCALE_DTYPES,
        default_dtypes=(torch.bfloat16, torch.float16),
        shapes="N a multiple of 16, K and groups multiples of 32, a CPU with AVX2, a C compiler",
        stored="exactly linear_bytes, and no scratch weight",
        cost="0.15 to 0.25 of a bf16 matmul for one row, 0.2 to 0.35 of it for 8 to 512; with AVX2 "
        "alone 0.2 and 0.1 of it, 0.6 of a float32 matmul for 512; rounds activations to 8 bits",
    )

    def fits(self, precision: Precision, out_features: int, in_features: int) -> bool:
        """Return whether the weight is whole tiles, and AVX2 and the library are there."""
        fits = fits_tiles(out_features, in_features, precision.effective_group(in_features))
        return fits and has_int8(instruction_set()) and library() is not None

    def linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias`` with x rounded to 8 bits; see ``KernelBackend``."""
        return packed_int8_product(x, weight, bias)


class CpuLlmInt8Backend(TileBackend):
    """LLM.int8(): each row of x is rounded to 8 bits, but for its outliers, in one pass.

    The default of 16-bit runs only; a float32 run asks for exactness, which weight-only gives.
    """

    name = "cpu_llm_int8"
    capability = Capability(
        device_types=("cpu",),
        bits=(8,),
        dtypes=SCALE_DTYPES,
        default_dtypes=(torch.bfloat16, torch.float16),
        shapes="symmetric, one scale a channel, N a multiple of 16, K of 32, a CPU with AVX2, "
        "a C compiler",
        stored="exactly linear_bytes",
        cost="a quarter of a bf16 matmul for one row, half of it for 32 to 512; with AVX2 alone "
        "0.3 and 0.15 of it, 0.8 of a float32 matmul for 512; rounds activations to 8 bits except "
        "outliers",
    )

    def fits(self, precision: Precision, out_features: int, in_features: int) -> bool:
        """Return whether the weight is LLM.int8()'s in whole tiles; AVX2, the library are there."""
        per_channel = precision.effective_group(in_features) == in_features
        fits = fits_tiles(out_features, in_features, in_features)
        is_ready = has_int8(instruction_set()) and library() is not None
        return per_channel and precision.symmetric and fits and is_ready

    def linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias`` with x rounded to 8 bits a row, outliers apart."""
        return int8_product(x, weight, bias, OUTLIER_THRESHOLD)


class Scratch(threading.local):
    """One growing buffer for each thread, overwritten by every call.

    The operating system maps and zeroes fresh memory of 32 MiB and more at every call, which costs
    up to eight times the conversion itself. One buffer for each thread: stages may run as threads
    of one process.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return ``[rows, columns]`` of undefined content, valid until the next ``take``."""
        size = rows * columns * dtype.itemsize
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        return self._buffer[:size].view(dtype).view(rows, columns)


class ReferenceBackend(KernelBackend):
    """Weight-only: the integers become floats of x's dtype, then the library's own matmul runs."""

    name = "reference"
    reads_rows = True
    capability = Capability(
        device_types=(),
        bits=PACKED_BITS,
        dtypes=SCALE_DTYPES,
        default_dtypes=SCALE_DTYPES,
        shapes="any shape and group",
        stored="exactly linear_bytes; plus one scratch weight a thread on a CPU",
        cost="dequantizes the whole weight at every call: 3 to 12 times a bf16 matmul for one "
        "row on a CPU, 1.1 to 1.5 times for 512. No error beyond that of the codes",
    )

    def __init__(self) -> None:
        self._scratch = Scratch()

    def fits(self, precision: Precision, out_features: int, in_features: int) -> bool:
        """Return whether the precision has a packed form; every shape and device is supported."""
        del precision, out_features, in_features
        return True

    def layout(self, packed: PackedWeight) -> tuple[Tensor, ...]:
        """Return the tensors of ``packed`` as ``linear`` reads them."""
        zeros = () if packed.zeros is None else (packed.zeros,)
        return (packed.codes, packed.scales, *zeros)

    def rows(self, weight: PreparedWeight, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows of a weight; see ``KernelBackend``."""
        flat = ids.reshape(-1)
        chosen = _packed(weight, [tensor[flat] for tensor in weight.tensors])
        return chosen.dequantize(dtype).view(*ids.shape, weight.in_features)

    def linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias``; see ``KernelBackend``."""
        packed = _packed(weight, weight.tensors)
        codes = packed.codes
        if codes.device.type != "cpu":  # accelerators' allocators keep their memory mapped
            return F.linear(x, packed.dequantize(x.dtype), bias)
        dense = self._scratch.take(weight.out_features, weight.in_features, x.dtype)
        packed.dequantize_into(dense)
        return F.linear(x, dense, bias)


def _packed(weight: PreparedWeight, tensors: Sequence[Tensor]) -> PackedWeight:
    """Return the packed form of a weight, or of the rows of it that ``tensors`` hold."""
    codes, scales, *zeros = tensors
    return PackedWeight(
        out_features=codes.shape[0],
        in_features=weight.in_features,
        precision=weight.precision,
        codes=codes,
        scales=scales,
        zeros=zeros[0] if zeros else None,
    )


BACKENDS: dict[str, KernelBackend] = {
    backend.name: backend
    for backend in (
        CpuLlmInt8Backend(),
        CpuPackedInt8Backend(),
        CpuPackedBackend(),
        CpuInt4Backend(),
        CpuInt8Backend(),
        *cuda_backends(),
        ReferenceBackend(),
    )
}
"""Every backend by name in order of preference; ``reference``, last, accepts every weight."""


def choose_backend(
    device: torch.device | str,
    precision: Precision,
    dtype: torch.dtype,
    out_features: int,
    in_features: int,
    prefer: str | None = None,
    *,
    reads_rows: bool = False,
) -> KernelBackend:
    """Return the backend for a weight ``[out_features, in_features]``.

    Args:
        device: such as ``cpu`` or ``cuda:1``; a GPU without a number is the current one.
        precision: how the weight is stored; 3, 4 or 8 bits.
        dtype: dtype of the activations, which is that of the scales.
        out_features: N.
        in_features: K.
        prefer: a backend to use for every weight it supports; other weights get their default.
        reads_rows: whether rows of the weight are read, too: it is an embedding.

    Raises:
        SpecError: ``prefer`` names no backend, or no backend supports the weight.
    """
    if prefer is not None and prefer not in BACKENDS:
        raise SpecError(f"kernel backend: found '{prefer}', expected one of {sorted(BACKENDS)}")
    asked = (device, precision, dtype, out_features, in_features)
    able = [one for one in BACKENDS.values() if one.reads_rows or not reads_rows]
    for backend in able:
        if backend.name == prefer and backend.supports(*asked):
            return backend
    for backend in able:
        if dtype in backend.capability.default_dtypes and backend.supports(*asked):
            return backend
    raise SpecError(
        f"kernel backend: no backend supports {precision} weights with {dtype} on '{device}'"
    )
