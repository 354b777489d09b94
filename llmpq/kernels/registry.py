"""The backends by name, and the choice among them.

The choice is made once for each weight, when it is loaded, from device, precision, dtype and shape.
It does not depend on the number of rows: a backend that has several algorithms picks one inside
``linear``.
"""

from __future__ import annotations

import torch

from llmpq.errors import SpecError
from llmpq.kernels.base import KernelBackend
from llmpq.kernels.cpu.compiled import (
    CpuLlmInt8Backend,
    CpuPackedBackend,
    CpuPackedInt8Backend,
)
from llmpq.kernels.cpu.dispatch import CpuInt4Backend, CpuInt8Backend
from llmpq.kernels.gpu.cuda import cuda_backends
from llmpq.kernels.reference import ReferenceBackend
from llmpq.spec.precision import Precision

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
