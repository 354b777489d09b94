"""BufferPool: host memory that is read into, used, and used again for the next matrix.

Fresh memory costs as much as reading into it: the system clears every page when it is first
touched, and takes it back from every core when it is freed. So loans are cut from one piece of
memory, of any sizes, and return to it. This module refuses to decide when a loan has ended: that
is when the last tensor on it is gone, whoever held it.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque

import torch
from torch import Tensor

_ALIGNMENT = 4096  # a page, so that no two loans share one; more than any kernel wants
_LARGE_BYTES = 2 << 20  # below, a page of that size would be memory nobody counts


class BufferPool:
    """Memory that is lent as tensors, and is back when nobody refers to them.

    Args:
        limit_bytes: of the pool. A loan that finds no room in it is fresh memory, and goes when it
            ends.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._memory: Tensor | None = None
        self._size = limit_bytes // _ALIGNMENT * _ALIGNMENT
        self._free = [(0, self._size)]  # begin and end of every gap, in order
        self._asking = threading.Lock()
        # Filled by whatever thread drops a tensor, perhaps amid a loan of its own: no lock.
        self._returned: deque[tuple[int, int]] = deque()

    def lend(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor with undefined content; any thread may ask."""
        with self._asking:
            return self._lend(shape, dtype)

    def _lend(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        self._collect()
        taken = _rounded(nbytes)
        begin = self._cut(taken) if nbytes else None
        if begin is None:
            return fresh(shape, dtype)
        if self._memory is None:
            self._memory = _in_large_pages(self._size)
        # An object of its own: its end is that of the loan.
        loan = self._memory.numpy()[begin : begin + nbytes]
        weakref.finalize(loan, self._returned.append, (begin, begin + taken)).atexit = False
        return torch.from_numpy(loan).view(dtype).view(shape)

    def _collect(self) -> None:
        while self._returned:
            self._join(*self._returned.popleft())

    def _cut(self, nbytes: int) -> int | None:
        """Take the front of the first gap that is large enough, or the back of the last.

        Small loans lie at the back: amid the memory they would leave no gap for a large one.
        """
        fitting = [gap for gap in self._free if gap[1] - gap[0] >= nbytes]
        if not fitting:
            return None
        is_small = 4 * nbytes < self._size
        begin, end = gap = fitting[-1 if is_small else 0]
        place = self._free.index(gap)
        rest = (begin, end - nbytes) if is_small else (begin + nbytes, end)
        self._free[place : place + 1] = [rest] if rest[0] < rest[1] else []
        return end - nbytes if is_small else begin

    def _join(self, begin: int, end: int) -> None:
        """Put a part back among the gaps, and make one of those that touch."""
        gaps: list[tuple[int, int]] = []
        for gap in sorted((*self._free, (begin, end))):
            if gaps and gaps[-1][1] == gap[0]:
                gaps[-1] = (gaps[-1][0], gap[1])
            else:
                gaps.append(gap)
        self._free = gaps


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def fresh(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory of its own, into which a disk can write where it is large; it may stay."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if nbytes < _LARGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    return _in_large_pages(nbytes).view(dtype).view(shape)


def _in_large_pages(nbytes: int) -> Tensor:
    """Return memory apart from the heap, in pages of 2 MiB where the system has some."""
    # Private: shared memory, mmap's default, gets large pages only where the system is told so.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
