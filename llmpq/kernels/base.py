"""The base class of kernel backends and the form in which they keep a weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.errors import SpecError
from llmpq.kernels.packed import PackedWeight
from llmpq.spec.precision import Precision, linear_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedWeight:
    """A weight in the layout of one backend: the only copy of it that stays in memory.

    Attributes:
        backend: name of the backend that prepared it and alone can read it.
        out_features: N.
        in_features: K.
        precision: how the weight was quantized.
        tensors: the backend's own layout.
        handle: what a compiled backend passes at every call; made from ``tensors``, owns nothing.
    """

    backend: str
    out_features: int
    in_features: int
    precision: Precision
    tensors: tuple[Tensor, ...]
    handle: object | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held, including the padding inside oneDNN's opaque layouts."""
        return sum(tensor_bytes(tensor) for tensor in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """One row of the capability table: where a backend runs, for which weights, at what cost.

    Attributes:
        device_types: torch device types; empty means any.
        bits: stored bitwidths.
        dtypes: dtypes of activations and scales it accepts.
        default_dtypes: those of them for which it is chosen by default.
        shapes: the shapes and groups it accepts, in words; ``supports`` decides.
        stored: bytes it keeps, compared with ``spec.precision.linear_bytes``.
        cost: time of a product, compared with a bf16 product.
    """

    device_types: tuple[str, ...]
    bits: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    default_dtypes: tuple[torch.dtype, ...]
    shapes: str
    stored: str
    cost: str


class KernelBackend(ABC):
    """An algorithm that multiplies activations by a packed weight.

    Attributes:
        name: the name a user gives; its key in the registry.
        capability: its row of the capability table.
        reads_rows: whether it has ``rows``.
    """

    name: str
    capability: Capability
    reads_rows: bool = False

    def supports(
        self,
        device: torch.device | str,
        precision: Precision,
        dtype: torch.dtype,
        out_features: int,
        in_features: int,
    ) -> bool:
        """Return whether it can run a weight ``[out_features, in_features]`` on a device.

        A GPU without a number is the current one of this thread.
        """
        row, device = self.capability, torch.device(device)
        on_device = not row.device_types or device.type in row.device_types
        is_covered = on_device and precision.bits in row.bits and dtype in row.dtypes
        fits = is_covered and self.fits(precision, out_features, in_features)
        return fits and self.runs_on(device, dtype)

    @abstractmethod
    def fits(self, precision: Precision, out_features: int, in_features: int) -> bool:
        """Return whether shape, group and machine allow a weight that ``capability`` covers."""

    def runs_on(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether this device, of a type that ``capability`` names, can run it."""
        del device, dtype
        return True

    def stored_bytes(
        self, precision: Precision, dtype: torch.dtype, out_features: int, in_features: int
    ) -> int:
        """Return the bytes that ``prepare`` keeps: ``linear_bytes`` unless overridden."""
        return linear_bytes(out_features, in_features, precision, dtype.itemsize)

    def prepare(self, packed: PackedWeight) -> PreparedWeight:
        """Return the weight in the backend's layout; keeps no reference to ``packed``.

        Raises:
            SpecError: the backend does not support ``packed`` in the dtype of its scales.
        """
        self.check_supported(packed)
        return PreparedWeight(
            backend=self.name,
            out_features=packed.out_features,
            in_features=packed.in_features,
            precision=packed.precision,
            tensors=self.layout(packed),
        )

    def layout(self, packed: PackedWeight) -> tuple[Tensor, ...]:
        """Return the tensors of ``packed`` as ``linear`` reads them; see ``prepare``."""
        raise NotImplementedError

    @abstractmethod
    def linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias`` for ``x`` ``[..., K]``: ``[..., N]`` in x's dtype."""

    def rows(self, weight: PreparedWeight, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows of a weight, as an embedding looks them up.

        Args:
            weight: of this backend, whose ``reads_rows`` is True.
            ids: rows, int64 ``[...]``.
            dtype: of the result.

        Returns:
            ``[..., K]``, dequantized in float32 and rounded once.
        """
        raise NotImplementedError

    def check_supported(self, packed: PackedWeight) -> None:
        """Raise ``SpecError`` when the backend does not support ``packed``."""
        device = packed.codes.device
        shape = (packed.out_features, packed.in_features)
        if not self.supports(device, packed.precision, packed.dtype, *shape):
            raise SpecError(
                f"kernel '{self.name}': found a {packed.precision} weight {list(shape)} with "
                f"{packed.dtype} scales on '{device}', expected {self.capability.shapes}"
            )


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes a tensor holds, opaque layouts of oneDNN included."""
    if tensor.layout == torch._mkldnn:  # type: ignore[attr-defined]  # absent from torch's stubs
        return int(torch.ops.mkldnn._nbytes(tensor))
    return tensor.nbytes
