"""A reusable buffer for the dequantized weight of one call."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


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
