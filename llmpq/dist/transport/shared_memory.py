"""Shared memory between the two ends of a link on one host, for payloads too large for a stream.

A header over the socket names the buffer that holds the payload and is the only wake-up. There are
two buffers, so one can be filled while the other is read; while both are in use, payloads travel in
the stream. The memory has no name, so it is freed when both processes have ended.
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


class _SharedMemory:
    """Maps a page with the number of released payloads, then the buffers."""

    def _map(self, descriptor: int, buffer_bytes: int) -> None:
        self._memory = mmap.mmap(descriptor, _size(buffer_bytes))
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._buffers = whole[mmap.PAGESIZE :].view(SHARED_BUFFERS, -1)
        self._count = 0  # payloads written or viewed


class SharedMemoryWriter(_SharedMemory):
    """The sending end, which makes the memory for payloads of at most ``buffer_bytes``."""

    def __init__(self, buffer_bytes: int) -> None:
        self.descriptor = os.memfd_create("llmpq-frames", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, _size(buffer_bytes))
        # With its size sealed, no page can be taken away from the reader.
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        self._map(self.descriptor, buffer_bytes)

    def close_descriptor(self) -> None:
        """Close the descriptor; the mapping stays."""
        os.close(self.descriptor)

    def write(self, payload: Tensor) -> int:
        """Copy a payload to a free buffer; return its number, from 1, or 0 if none is free."""
        (released,) = _COUNTER.unpack_from(self._memory)
        if self._count - released >= SHARED_BUFFERS:
            return 0
        index = self._count % SHARED_BUFFERS
        self._buffers[index][: payload.numel()].copy_(payload)
        self._count += 1
        return index + 1


class SharedMemoryReader(_SharedMemory):
    """The receiving end; takes over a descriptor, which must be of the memory of this link."""

    def __init__(self, descriptor: int, buffer_bytes: int) -> None:
        try:
            found = os.fstat(descriptor).st_size
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if found != _size(buffer_bytes) or seals != _SEALS:
                raise StageError(
                    f"shared memory refused: found {found} bytes with seals {seals:#x}, "
                    f"expected {_size(buffer_bytes)} with {_SEALS:#x}"
                )
            self._map(descriptor, buffer_bytes)
        except OSError as error:
            raise StageError(f"shared memory refused: {error.strerror}") from None
        finally:
            os.close(descriptor)

    def view(self, buffer: int, size: int) -> Tensor:
        """Return the payload ``[size]`` of the buffer that a header names, the next one."""
        expected = self._count % SHARED_BUFFERS + 1
        if buffer != expected:
            raise StageError(f"frame refused: buffer: found {buffer}, expected {expected}")
        self._count += 1
        return self._buffers[buffer - 1][:size]

    def release(self) -> None:
        """Let the writer reuse the buffers of all payloads viewed so far."""
        _COUNTER.pack_into(self._memory, 0, self._count)


def _size(buffer_bytes: int) -> int:
    """Return the bytes of the memory; every buffer begins at a page."""
    return mmap.PAGESIZE * (1 + SHARED_BUFFERS * -(-buffer_bytes // mmap.PAGESIZE))
