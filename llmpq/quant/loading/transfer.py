"""From the disk's memory to the device's: nothing on a CPU, pinned copies on a stream on CUDA.

The CUDA way follows torch's rules for copies that overlap (pinned source, a stream of its own, an
event before use, ``record_stream`` before reuse); it was written without a GPU at hand, and
``scripts/gpu_check`` is where it is run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llmpq.models.files.sources import on_host
from llmpq.quant.loading.buffers import BufferPool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sent:
    """A tensor on its way.

    Attributes:
        tensor: on the device; its content is defined once ``arrived`` has happened.
        arrived: ``None`` when there is nothing to wait for.
    """

    tensor: Tensor
    arrived: torch.cuda.Event | None = None


class Transfer(Protocol):
    """A way from the reading thread's memory to a device."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return host memory to read into."""

    def borrow(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return host memory for what is soon dropped again; for the reading threads alone."""

    def workspace(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return device memory for what is soon dropped again; for the calling thread alone."""

    def send(self, tensor: Tensor) -> Sent:
        """Start copying what was read; the caller drops ``tensor``."""

    def receive(self, sent: Sent) -> Tensor:
        """Return the tensor, usable by whatever the calling thread runs next on the device."""

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """Return what every thread of the loader enters first."""


class HostTransfer:
    """The CPU: what was read is where it has to be.

    Args:
        reused_bytes: of memory that is used again and again: three quarters to read into, the rest
            for codes: at 4 bits what is under way is shared about so.
    """

    def __init__(self, reused_bytes: int) -> None:
        self._pool = BufferPool(reused_bytes * 3 // 4)
        self._work = BufferPool(reused_bytes // 4)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return plain memory."""
        return on_host(shape, dtype)

    def borrow(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory that was used before, where there is some."""
        return self._pool.lend(shape, dtype)

    def workspace(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory that was used before, where there is some."""
        return self._work.lend(shape, dtype)

    def send(self, tensor: Tensor) -> Sent:
        """Hand the tensor itself on."""
        return Sent(tensor=tensor)

    def receive(self, sent: Sent) -> Tensor:
        """Return the tensor itself."""
        return sent.tensor

    def scope(self) -> contextlib.AbstractContextManager[object]:
        """Return nothing to enter."""
        return torch.no_grad()


class CudaTransfer:
    """A CUDA device: copies run on a stream of their own while the device quantizes.

    torch's allocator of pinned memory keeps a buffer until its copy is done and then reuses it, so
    pinned memory stays within twice the loader's budget (it rounds sizes up to powers of two).

    Args:
        device: the accelerator, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compute = torch.cuda.current_stream(device)
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return pinned memory: only from there does a copy run by itself."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def borrow(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return pinned memory as well, which torch reuses by itself."""
        return self.allocate(shape, dtype)

    def workspace(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory of the device, which torch reuses by itself."""
        return torch.empty(shape, dtype=dtype, device=self._device)

    def send(self, tensor: Tensor) -> Sent:
        """Start the copy on the copying stream."""
        with torch.cuda.stream(self._copies):
            copy = tensor.to(self._device, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._copies)
        return Sent(tensor=copy, arrived=arrived)

    def receive(self, sent: Sent) -> Tensor:
        """Let the computing stream wait for the copy; the host does not."""
        assert sent.arrived is not None
        self._compute.wait_event(sent.arrived)
        # The memory belongs to the copying stream: it must not reuse it while we compute with it.
        sent.tensor.record_stream(self._compute)
        return sent.tensor

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Make the device and the loader's stream those of the entering thread."""
        with torch.no_grad(), torch.cuda.device(self._device), torch.cuda.stream(self._compute):
            yield


def transfer_to(device: torch.device | str, reused_bytes: int = 0) -> Transfer:
    """Return the way to a device.

    Args:
        device: where tensors go.
        reused_bytes: of host memory to read into again and again, where it is not pinned.
    """
    device = torch.device(device)
    return CudaTransfer(device) if device.type == "cuda" else HostTransfer(reused_bytes)
