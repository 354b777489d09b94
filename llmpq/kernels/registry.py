"""The backends by name, and the choice among them.

The choice is made once for each weight, when it is loaded, from device, precision, dtype and shape.
It does not depend on the number of rows: a backend that has several algorithms picks one inside
``linear``. ``ReferenceBackend`` dequantizes, then multiplies: it supports every precision and
device, and tests compare the others with it.

Shape legend: N output features, K input features, G groups of a row.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from llmpq.errors import SpecError
from llmpq.kernels.base import Capability, KernelBackend, PreparedWeight
from llmpq.kernels.cpu.compiled_backends import (
    CpuLlmInt8Backend,
    CpuPackedBackend,
    CpuPackedInt8Backend,
)
from llmpq.kernels.cpu.torch_kernels import CpuInt4Backend, CpuInt8Backend
from llmpq.kernels.gpu.cuda import cuda_backends
from llmpq.kernels.packed import PACKED_BITS, SCALE_DTYPES, PackedWeight
from llmpq.spec.precision import Precision


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
        CpuInt4Backend(4),
        CpuInt8Backend(),
        CpuInt4Backend(3),
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
