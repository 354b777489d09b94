"""ReadAhead: tensors read in a known order, with the disk asked for the next ones meanwhile.

A reader that asks for one tensor after the other leaves the disk idle whenever it does anything
else: copies, waits for memory, builds a layer. So it tells what it will read, and always has some
of that under way into the system's cache. This module refuses to hold any of it: what was asked
for and never read costs its time and nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import Tensor

from llmpq.models.sources import Allocate, ByteRange, TensorSource
from llmpq.models.tensor_files import TensorFiles
from llmpq.units import MIB

WINDOW_BYTES = 32 * MIB
"""Asked for and not yet read: some 15 ms of a fast disk, which no pause of the reader exceeds."""
_PIECE_BYTES = 8 * MIB


class ReadAhead:
    """Reads tensors of one model directory in the order in which they were announced.

    Args:
        tensors: of the directory.
        window_bytes: how much to ask for beyond the tensor that is being read.
    """

    def __init__(self, tensors: TensorFiles, window_bytes: int = WINDOW_BYTES) -> None:
        self._tensors = tensors
        self._window_bytes = window_bytes
        self._coming: deque[ByteRange] = deque()
        self._ahead_bytes = 0  # asked for and not read; below 0 while a tensor still has to be

    def follow(self, sources: Iterable[TensorSource]) -> None:
        """Announce what will be read after all that was announced before."""
        for source in sources:
            for part in source.ranges:
                self._coming.extend(_pieces(part))

    def load(self, source: TensorSource, allocate: Allocate) -> Tensor:
        """Read a tensor that was announced; the disk has the next ones to do by then.

        Raises:
            SpecError: as ``TensorFiles.load``.
        """
        self._ahead_bytes -= source.nbytes
        while self._coming and self._ahead_bytes < self._window_bytes:
            part = self._coming.popleft()
            self._tensors.will_need(part)
            self._ahead_bytes += part.nbytes
        return self._tensors.load(source, allocate)


def _pieces(part: ByteRange) -> Iterator[ByteRange]:
    for begin in range(0, part.nbytes, _PIECE_BYTES):
        count = min(_PIECE_BYTES, part.nbytes - begin)
        yield replace(part, begin=part.begin + begin, nbytes=count)
