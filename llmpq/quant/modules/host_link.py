"""HostLink: rows of an accelerator in the host's memory and back, through a ring of pinned slots.

No accelerator has run this: tests run it on CPU tensors with events that record what was called.

Shapes: T tokens, H hidden, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llmpq.spec.runtime_constants import HOST_LINK_SLOTS

Rows = tuple[Tensor, Tensor, Tensor]
"""Rows ``[T, H]``, the experts of each ``[T, k]``, and their weights ``[T, k]``."""


class Event(Protocol):
    """A mark in a stream, as ``torch.cuda.Event``."""

    def record(self) -> None:
        """Put the mark behind what is queued."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has reached the mark; at once if it was never put."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """Host memory for the rows of one layer, and for their sum.

    Attributes:
        room: of it, in bytes.
        sent: reached once the rows are in the host's memory.
        read: reached once the device has read the sum.
    """

    room: Tensor
    sent: Event
    read: Event


class HostLink:
    """A ring of slots.

    Args:
        event: makes an event of the device.
        is_pinned: whether slots are pinned, so that copies need not wait for each other.
    """

    def __init__(self, event: Callable[[], Event], *, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._slots = [
            Slot(room=torch.empty(0, dtype=torch.uint8), sent=event(), read=event())
            for _ in range(HOST_LINK_SLOTS)
        ]
        self._next = 0

    def send(self, rows: Rows) -> tuple[Slot, Rows, Tensor]:
        """Queue copies of rows to a slot.

        Returns:
            The slot, the rows in it once ``sent`` is reached (experts int32, weights float32), and
            a tensor ``[T, H]`` of the dtype of the rows for their sum.
        """
        slot = self._slots[self._next]
        self._next = (self._next + 1) % HOST_LINK_SLOTS
        slot.read.synchronize()
        hidden, index, weights = rows
        forms = (
            (hidden.shape, hidden.dtype),
            (index.shape, torch.int32),
            (weights.shape, torch.float32),
            (hidden.shape, hidden.dtype),
        )
        x, chosen, factors, y = self._take(slot, forms)
        for place, values in zip((x, chosen, factors), rows, strict=True):
            # Converted on the device: a copy that converts is not asynchronous.
            place.copy_(values.to(place.dtype), non_blocking=True)
        slot.sent.record()
        return slot, (x, chosen, factors), y

    def receive(self, slot: Slot, y: Tensor, device: torch.device) -> Tensor:
        """Return a sum on the device; its copy is queued."""
        made = torch.empty(y.shape, dtype=y.dtype, device=device)
        made.copy_(y, non_blocking=True)
        slot.read.record()
        return made

    def _take(self, slot: Slot, forms: tuple[tuple[torch.Size, torch.dtype], ...]) -> list[Tensor]:
        """Return tensors in the memory of a slot, each from a cache line on."""
        sizes = [-(-shape.numel() * dtype.itemsize // 64) * 64 for shape, dtype in forms]
        if slot.room.nbytes < sum(sizes):
            slot.room = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self._is_pinned)
        parts = torch.split(slot.room[: sum(sizes)], sizes)
        return [
            part[: shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for part, (shape, dtype) in zip(parts, forms, strict=True)
        ]


def link_of(device: torch.device) -> HostLink | None:
    """Return the link of an accelerator, ``None`` for a CPU, which reads the host's memory."""
    if device.type == "cpu":
        return None
    streams = getattr(torch, device.type)
    return HostLink(streams.Event, is_pinned=device.type in ("cuda", "xpu"))
