"""The one temporary that dequantizing backends need: a weight's worth of memory that stays mapped.

It refuses to be a cache: what one call wrote, the next overwrites.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class Scratch(threading.local):
    """One growing buffer a thread, into which weights are dequantized one after the other.

    Fresh memory of 32 MiB and more is mapped and zeroed by the kernel at every call, which costs
    up to eight times the conversion itself; a buffer that stays mapped does not. One a thread,
    because stages that run as threads of one process must not write into each other's weights.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return ``[rows, columns]`` of undefined content, valid until the next ``take``."""
        size = rows * columns * dtype.itemsize
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        return self._buffer[:size].view(dtype).view(rows, columns)
