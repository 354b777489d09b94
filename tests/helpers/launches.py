"""Counts the kernels that a GPU would launch for some work, on tensors without memory.

Operators of torch are seen as they are dispatched; Triton's kernels by what stands in for their
modules. Work on the meta device takes the way of a GPU: it has no other kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from helpers import fused_rows
from helpers.decode_attention import Launches, use_without_kernels
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from llmpq.kernels.base import KernelBackend, PackedWeight, PreparedWeight
from llmpq.kernels.gpu import triton_int
from llmpq.kernels.gpu.cuda import CudaInt4Backend, inner_tiles
from llmpq.kernels.gpu.triton_int import TritonIntBackend, segments
from llmpq.quant.modules.layer import QuantLinear
from llmpq.spec.precision import Precision, default_precision

PROCESSORS = 132
"""Of an H100: few rows are split into parts for as many."""
_ALLOCATIONS = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")
)


class LaunchCounter(TorchDispatchMode):
    """Runs operators and keeps the names of those that launch a kernel.

    Views and allocations launch none; any other operator counts once.

    Attributes:
        names: of operators, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator."""
        kwargs = kwargs or {}
        if func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if name not in _ALLOCATIONS and not func.is_view:
            self.names.append(name)
        if name == "_weight_int4pack_mm":  # torch's own for this device needs a fake tensor
            rows, words = args[:2]
            return rows.new_empty(len(rows), 8 * len(words))
        return func(*args, **kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What some work launches.

    Attributes:
        operators: of torch.
        kernels: of Triton.
    """

    operators: tuple[str, ...]
    kernels: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.operators) + len(self.kernels)


def counted(work: Callable[[], object], triton: Launches) -> Counted:
    """Run ``work`` and return what it launches; ``triton`` is from :func:`use_kernels_of_a_gpu`."""
    mode, before = LaunchCounter(), len(triton.names)
    with torch.inference_mode(), mode:
        work()
    return Counted(operators=tuple(mode.names), kernels=tuple(triton.names[before:]))


def use_kernels_of_a_gpu(monkeypatch: Any) -> Launches:
    """Let the code that launches Triton's kernels run as on an H100, and launch nothing."""
    launches = use_without_kernels(monkeypatch)
    fused_rows.use_without_kernels(monkeypatch, launches)
    monkeypatch.setattr(triton_int, "kernels", lambda: launches)
    monkeypatch.setattr(triton_int, "launch_failure", lambda *_: None)
    monkeypatch.setattr(triton_int, "_processors", lambda _: PROCESSORS)
    return launches


class _Int4WithoutMemory(CudaInt4Backend):
    def prepare(self, packed: PackedWeight) -> PreparedWeight:
        rows, columns = packed.out_features, packed.in_features
        tiles = inner_tiles(columns)
        shape = (rows // 8, columns // (16 * tiles), 32, tiles // 2)
        groups = columns // packed.group_size
        return _prepared(
            self,
            packed,
            torch.empty(shape, dtype=torch.int32, device="meta"),
            torch.empty((groups, rows, 2), dtype=packed.dtype, device="meta"),
        )


class _TritonWithoutMemory(TritonIntBackend):
    def prepare(self, packed: PackedWeight) -> PreparedWeight:
        rows, columns, bits = packed.out_features, packed.in_features, packed.precision.bits
        assert columns % segments(bits) == 0
        groups = columns // packed.group_size
        affine = [torch.empty((groups, rows), dtype=packed.dtype, device="meta")]
        return _prepared(
            self,
            packed,
            torch.empty((rows, columns * bits // 8), dtype=torch.uint8, device="meta"),
            *affine * (2 - packed.precision.symmetric),
        )


def _prepared(backend: KernelBackend, packed: PackedWeight, *tensors: Tensor) -> PreparedWeight:
    return PreparedWeight(
        backend=backend.name,
        out_features=packed.out_features,
        in_features=packed.in_features,
        precision=packed.precision,
        tensors=tensors,
    )


def quantize_without_memory(layers: nn.ModuleList, bits: int) -> None:
    """Replace the linear operators of layers by those that a GPU prefers at so many bits."""
    if bits == 16:
        return
    backend: KernelBackend = _Int4WithoutMemory() if bits == 4 else _TritonWithoutMemory("meta")
    for name, part in list(layers.named_modules()):
        if isinstance(part, nn.Linear):
            rows, columns = part.weight.shape
            precision = default_precision(bits)
            packed = _packed(rows, columns, precision, part.weight.dtype)
            layers.set_submodule(name, QuantLinear(packed, part.bias, backend))


def _packed(rows: int, columns: int, precision: Precision, dtype: torch.dtype) -> PackedWeight:
    groups = columns // precision.effective_group(columns)
    scales = torch.ones(rows, groups, dtype=dtype, device="meta")
    return PackedWeight(
        out_features=rows,
        in_features=columns,
        precision=precision,
        codes=torch.zeros((rows, columns * precision.bits // 8), dtype=torch.uint8, device="meta"),
        scales=scales,
        zeros=None if precision.symmetric else torch.zeros_like(scales),
    )
