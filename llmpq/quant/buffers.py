"""BufferPool: host memory that is read into, used, and used again for the next matrix.

Fresh memory costs as much as reading into it: the system clears every page when it is first
touched, and takes it back from every core when it is freed. This module refuses to decide when a
buffer is free: that is when the last tensor on it is gone, whoever held it.
"""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch import Tensor


class BufferPool:
    """Buffers of one reading thread, lent as tensors and back when nobody refers to them.

    Args:
        limit_bytes: free buffers are let go rather than to hold more than this, lent ones counted.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._free: list[Tensor] = []  # uint8, the longest unused first
        # Filled by whatever thread drops a tensor, perhaps amid this one's own work: no lock.
        self._returned: deque[Tensor] = deque()
        self.total_bytes = 0

    def lend(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor with undefined content; only one thread may ask."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        while self._returned:
            self._free.append(self._returned.popleft())
        buffer = self._found(nbytes)
        if buffer is None:
            while self._free and self.total_bytes + nbytes > self._limit_bytes:
                self.total_bytes -= self._free.pop(0).nbytes
            buffer = torch.empty(nbytes, dtype=torch.uint8)
            self.total_bytes += nbytes
        loan = buffer.numpy()[:]  # an object of its own: its end is that of the loan
        weakref.finalize(loan, self._returned.append, buffer).atexit = False
        return torch.from_numpy(loan).view(dtype).view(shape)

    def _found(self, nbytes: int) -> Tensor | None:
        """Take the free buffer of just this size that was used last, and may still be cached."""
        for place in range(len(self._free) - 1, -1, -1):
            if self._free[place].nbytes == nbytes:
                return self._free.pop(place)
        return None
