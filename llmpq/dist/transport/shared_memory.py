"""Arena: memory that both ends of a link on one host share, for payloads too large for a stream.

A stream hands 1 MiB over in pieces of 32 KiB, and a receiver that waits is woken for each of them
(docs/benchmarks.md, "Transport"). A payload that lies in shared memory needs one: its header, which
travels over the socket as ever and names the place. There are two places, so that one can be filled
while the other is read; while both are in use, payloads travel in the stream as before, and nobody
waits. The memory has no name: it goes when both processes have gone, however they go.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from typing import Final

import torch
from torch import Tensor

from llmpq.errors import StageError
from llmpq.spec.runtime_constants import SHARED_BUFFERS

_COUNTER: Final = struct.Struct("<Q")
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class ArenaWriter:
    """The sending end, which makes the memory. Pages that no payload reaches are never touched.

    Args:
        place_bytes: the largest payload of the link.

    Attributes:
        fileno: descriptor of the memory, for the other end.
    """

    def __init__(self, place_bytes: int) -> None:
        self.fileno = os.memfd_create("llmpq-frames", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fileno, _size(place_bytes))
        # The reader may count on every byte: no size that changes can take pages from under it.
        fcntl.fcntl(self.fileno, fcntl.F_ADD_SEALS, _SEALS)
        self._shared = _Shared(self.fileno, place_bytes)
        self._count = 0

    def handed_over(self) -> None:
        """Close the descriptor: the other end has its own."""
        os.close(self.fileno)

    def put(self, payload: Tensor) -> int:
        """Copy a payload to a free place; return its number, from 1, or 0 when none is free."""
        if self._count - self._shared.taken >= SHARED_BUFFERS:
            return 0
        index = self._count % SHARED_BUFFERS
        self._shared.places[index][: payload.numel()].copy_(payload)
        self._count += 1
        return index + 1


class ArenaReader:
    """The receiving end.

    Args:
        fileno: what came over the link; taken over.
        place_bytes: the largest payload of the link.

    Raises:
        StageError: it is not the memory of this link.
    """

    def __init__(self, fileno: int, place_bytes: int) -> None:
        try:
            found, seals = os.fstat(fileno).st_size, fcntl.fcntl(fileno, fcntl.F_GET_SEALS)
            if found != _size(place_bytes) or seals != _SEALS:
                raise StageError(
                    f"shared memory refused: found {found} bytes with seals {seals:#x}, "
                    f"expected {_size(place_bytes)} with {_SEALS:#x}"
                )
            self._shared = _Shared(fileno, place_bytes)
        except OSError as error:
            raise StageError(f"shared memory refused: {error.strerror}") from None
        finally:
            os.close(fileno)
        self._count = 0

    def view(self, place: int, size: int) -> Tensor:
        """Return the payload ``[size]`` that a header says lies there.

        Raises:
            StageError: it is not the place that comes next.
        """
        expected = self._count % SHARED_BUFFERS + 1
        if place != expected:
            raise StageError(f"frame refused: place: found {place}, expected {expected}")
        self._count += 1
        return self._shared.places[place - 1][:size]

    def release(self) -> None:
        """Let the writer use every place again whose payload was looked at."""
        self._shared.taken = self._count


class _Shared:
    """A page with the number of payloads the reader is done with, and the places behind it."""

    def __init__(self, fileno: int, place_bytes: int) -> None:
        self._map = mmap.mmap(fileno, _size(place_bytes))
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.places = whole[mmap.PAGESIZE :].view(SHARED_BUFFERS, -1)

    @property
    def taken(self) -> int:
        """How many payloads the reader is done with."""
        return int(_COUNTER.unpack_from(self._map)[0])

    @taken.setter
    def taken(self, count: int) -> None:
        _COUNTER.pack_into(self._map, 0, count)


def _size(place_bytes: int) -> int:
    """Return the bytes of an arena whose places are whole pages."""
    return mmap.PAGESIZE * (1 + SHARED_BUFFERS * -(-place_bytes // mmap.PAGESIZE))
