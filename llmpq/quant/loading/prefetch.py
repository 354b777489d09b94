"""Prefetcher: reads items in a thread of its own, a few at a time, into reusable memory."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch
from torch import Tensor

from llmpq.units import MIB

T = TypeVar("T")

PAGE_BYTES = 2 * MIB
"""Of a large page."""


class Cancelled(Exception):  # noqa: N818  not an error: the caller has stopped
    """The caller does not want more items."""


class Slot:
    """The right to hold one item, with reusable host memory to read it into.

    Reading into memory that was used before saves the page faults of fresh memory; it begins at a
    page, so that a disk can write into it directly.

    Args:
        free: the queue that the slot returns to.
        is_pinned: whether the memory is pinned, for copies to a CUDA device.
    """

    def __init__(self, free: SimpleQueue[Slot | None], *, is_pinned: bool) -> None:
        self._free = free
        self._is_pinned = is_pinned
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor in the slot's memory with undefined content, valid until release."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if self._buffer.nbytes < nbytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # freed before it is replaced
            self._buffer = _pages(nbytes, is_pinned=self._is_pinned)
        return self._buffer[:nbytes].view(dtype).view(shape)

    def release(self) -> None:
        """Allow the next item to be read."""
        self._free.put(self)

    def close(self) -> None:
        """Give up the memory, which lives on in tensors that were made of it."""
        self._buffer = torch.empty(0, dtype=torch.uint8)


def _pages(nbytes: int, *, is_pinned: bool) -> Tensor:
    """Return memory that begins at a page, as direct reads need."""
    if is_pinned:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    if nbytes > PAGE_BYTES:  # Linux aligns only maps of whole huge pages to them
        nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # small pages make direct reads slow
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Prefetcher(Generic[T]):
    """Iterates over a generator in a thread of its own.

    Args:
        num_slots: items that may be held at once.
        is_pinned: whether the memory of the slots is pinned.
    """

    def __init__(self, num_slots: int, *, is_pinned: bool = False) -> None:
        self._free: SimpleQueue[Slot | None] = SimpleQueue()
        self._is_cancelled = False
        self._slots = [Slot(self._free, is_pinned=is_pinned) for _ in range(num_slots)]
        for slot in self._slots:
            slot.release()

    def acquire(self) -> Slot:
        """Wait for a free slot; called by the generator before it reads an item.

        Raises:
            Cancelled: the caller has stopped.
        """
        slot = self._free.get()
        if slot is None or self._is_cancelled:
            raise Cancelled
        return slot

    def iterate(self, items: Iterator[T]) -> Generator[T, None, None]:
        """Yield the items in order; close the generator to stop the thread.

        Raises:
            BaseException: what ``items`` raised.
        """
        ready: SimpleQueue[T | _End] = SimpleQueue()

        def read() -> None:
            error: BaseException | None = None
            try:
                for item in items:
                    ready.put(item)
                    del item
            except Cancelled:
                pass
            except BaseException as raised:  # raised again by the caller's thread
                error = raised
            ready.put(_End(error))

        thread = threading.Thread(target=read, name="load-read", daemon=True)
        thread.start()
        try:
            while not isinstance(item := ready.get(), _End):
                yield item
                del item  # frees it before the next one is waited for
            if item.error is not None:
                raise item.error
        finally:
            self._is_cancelled = True
            self._free.put(None)
            thread.join()
            # Slots and their queue refer to each other, and while a rank serves, Python's garbage
            # collector seldom runs.
            for slot in self._slots:
                slot.close()


@dataclass(frozen=True)
class _End:
    """Follows the last item."""

    error: BaseException | None
