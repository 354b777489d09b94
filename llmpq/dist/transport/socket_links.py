"""Links over stream sockets, unix inside a host and TCP between hosts.

On one host, large payloads of a ring lie in memory that both ends share, offered with the header of
the first of them. A header over the socket names the buffer that holds the payload and is the only
wake-up. There are two buffers, so one can be filled while the other is read; while both are in use,
payloads travel in the stream. The memory has no name, so it is freed when both processes have
ended.

Neither end trusts the other: a header has a fixed size, what it announces is checked against the
run's limits before anything is received, and payloads are received into one bounded buffer.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import mmap
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from llmpq.dist.transport.communicator import LinkClosedError
from llmpq.dist.transport.frames import (
    MAX_TEXT_BYTES,
    Frame,
    FrameLimits,
    Header,
    assemble,
    decode_header,
    encode_header,
    encode_tables,
)
from llmpq.dist.transport.topology import Link
from llmpq.errors import StageError
from llmpq.spec.runtime_constants import SHARED_BUFFERS, SHARED_FROM_BYTES

SEND_BUFFER_BYTES: Final = 8 << 20
"""Bytes that the kernel may hold for a unix socket: some micro-batches of decode."""
_MS: Final = 1000.0
_TIMEVAL: Final = struct.Struct("@ll")
_DESCRIPTOR: Final = struct.Struct("@i")
_COUNTER: Final = struct.Struct("<Q")
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SocketLinks:
    """The :class:`Links` of rank ``rank``; takes over its ends of the connected streams."""

    def __init__(self, rank: int, sockets: Mapping[Link, socket.socket]) -> None:
        self._rank = rank
        self._sockets = sockets

    @property
    def transport(self) -> str:
        """Of the ring link to the next rank: ``unix`` or ``tcp``."""
        own = [
            sock.family
            for link, sock in self._sockets.items()
            if link.source == self._rank and link.ring is not None
        ]
        return "unix" if all(family == socket.AF_UNIX for family in own) else "tcp"

    def writer(self, link: Link, limits: FrameLimits) -> SocketWriter:
        """Return the sending end of a link."""
        is_ring = link.ring is not None
        return SocketWriter(self._sockets[link], limits, is_shared=is_ring)

    def reader(self, link: Link, limits: FrameLimits, timeout_s: float) -> SocketReader:
        """Return the receiving end of a link."""
        is_ring = link.ring is not None
        return SocketReader(self._sockets[link], limits, timeout_s, is_shared=is_ring)


class SocketWriter:
    """A :class:`FrameWriter` that takes over a connected stream.

    On one host, large payloads may lie in shared memory if ``is_shared``.
    """

    def __init__(
        self, sock: socket.socket, limits: FrameLimits, *, is_shared: bool = False
    ) -> None:
        sock.setblocking(False)
        if sock.family == socket.AF_UNIX:  # TCP sizes its own buffers by the network
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._sock = sock
        self._limits = limits
        self._num_written = 0
        self._backlog: deque[memoryview] = deque()
        self._is_shared = is_shared and sock.family == socket.AF_UNIX
        self._memory: SharedMemoryWriter | None = None
        self._offer: memoryview | None = None  # the header that carries the memory's descriptor

    def write(self, frame: Frame) -> None:
        """Send what the kernel takes of a frame; :meth:`flush` sends the rest."""
        payload, had_memory = frame.payload, self._memory is not None
        if payload is not None:
            payload = payload.cpu()  # sockets send host memory
        buffer = 0 if frame.hidden is None or payload is None else self._share(payload)
        header = memoryview(encode_header(frame, self._limits, self._num_written, buffer))
        self._num_written += 1
        self._backlog.append(header)
        if buffer and not had_memory:
            self._offer = header
        tables = encode_tables(frame)
        if tables:
            self._backlog.append(memoryview(tables))
        if payload is not None and not buffer:
            self._backlog.append(_bytes_of(payload))
        self.flush()

    def flush(self) -> bool:
        """Send what the kernel takes; return whether nothing is left."""
        while self._backlog:
            try:
                count = self._send()
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                raise LinkClosedError(str(error)) from None
            while count:
                first = self._backlog.popleft()
                if count < len(first):
                    self._backlog.appendleft(first[count:])
                    break
                count -= len(first)
        return True

    def wait(self, timeout_s: float | None, wake: int, *, for_room: bool) -> None:
        """Wait until the descriptor ``wake`` is readable or, if asked, the kernel takes more."""
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        if for_room:
            poll.register(self._sock, select.POLLOUT)
        poll.poll(None if timeout_s is None else timeout_s * _MS)

    def drain(self, timeout_s: float, limit_s: float = math.inf) -> bool:
        """Send all that is left; return whether the peer took it.

        ``timeout_s`` is the longest time in which it takes nothing, ``limit_s`` that for all of it.
        """
        poll, deadline_s = select.poll(), time.monotonic() + limit_s
        poll.register(self._sock, select.POLLOUT)
        while not self.flush():
            wait_s = min(timeout_s, deadline_s - time.monotonic())
            if wait_s <= 0 or not poll.poll(wait_s * _MS):
                return False
        return True

    def close(self, timeout_s: float) -> None:
        """Give the peer ``timeout_s`` seconds to take the rest, and close the connection."""
        with contextlib.suppress(LinkClosedError):
            self.drain(timeout_s, timeout_s)
        self._sock.close()
        if self._offer is not None and self._memory is not None:
            self._memory.close_descriptor()

    def _share(self, payload: Tensor) -> int:
        """Copy a large payload to shared memory; return its buffer, 0 if it must follow."""
        if not self._is_shared or payload.numel() < SHARED_FROM_BYTES:
            return 0
        if self._memory is None:
            self._memory = SharedMemoryWriter(self._limits.max_payload_bytes)
        return self._memory.write(payload)

    def _send(self) -> int:
        """Send what the kernel takes of the next three parts, the offer on its own."""
        first, *others = itertools.islice(self._backlog, 3)
        if first is self._offer and self._memory is not None:
            count = socket.send_fds(self._sock, [first], [self._memory.descriptor])
            self._offer = None
            self._memory.close_descriptor()
            return count
        return self._sock.sendmsg([first, *(one for one in others if one is not self._offer)])


class SocketReader:
    """A :class:`FrameReader` that takes over a connected stream.

    ``timeout_s`` limits the wait for the rest of a payload; the peer may offer shared memory if
    ``is_shared``.
    """

    def __init__(
        self, sock: socket.socket, limits: FrameLimits, timeout_s: float, *, is_shared: bool = False
    ) -> None:
        sock.setblocking(True)
        whole_s = int(timeout_s)
        limit = _TIMEVAL.pack(whole_s, int((timeout_s - whole_s) * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.last_received_s = 0.0
        self._sock = sock
        self._limits = limits
        self._num_read = 0
        self._header_bytes = bytearray(limits.header_bytes)
        # Pages that no payload reaches take no memory.
        self._payload = torch.empty(
            max(limits.max_payload_bytes, MAX_TEXT_BYTES), dtype=torch.uint8
        )
        self._header: Header | None = None
        self._tables_bytes = bytearray(limits.max_tables_bytes)
        self._tables: bytes | None = None  # of the header, once they are here
        self._missing = memoryview(self._header_bytes)
        self._is_shared = is_shared and sock.family == socket.AF_UNIX
        self._memory: SharedMemoryReader | None = None

    def read(self, *, is_waiting: bool = False) -> Frame | None:
        """Return the next frame if it is here; the kernel gathers a payload that is waited for."""
        if self._memory is not None:
            self._memory.release()
        while True:
            is_gathering = is_waiting and self._header is not None
            if not self._fill(socket.MSG_WAITALL if is_gathering else socket.MSG_DONTWAIT):
                return None
            if self._header is None:
                buffers = 0 if self._memory is None else SHARED_BUFFERS
                data = bytes(self._header_bytes)
                header = decode_header(data, self._limits, self._num_read, buffers)
                self._num_read += 1
                self._header, self._tables = header, None
                self._missing = memoryview(self._tables_bytes)[: header.tables_bytes]
                continue
            header = self._header
            if self._tables is None:
                self._tables = bytes(self._tables_bytes[: header.tables_bytes])
                if not header.buffer:
                    self._missing = _bytes_of(self._payload)[: header.payload_bytes]
                    continue
            size = header.payload_bytes
            if header.buffer:
                assert self._memory is not None
                payload: Tensor | None = self._memory.view(header.buffer, size)
            else:
                payload = self._payload[:size] if size else None
            self._header = None
            self._missing = memoryview(self._header_bytes)
            return assemble(header, self._tables, payload, self._limits)

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def _fill(self, flags: int) -> bool:
        """Receive the missing bytes; return whether all are here."""
        while self._missing:
            try:
                count = self._receive(flags)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                raise LinkClosedError(str(error)) from None
            if count == 0:
                raise LinkClosedError("end of stream")
            self._missing = self._missing[count:]
            self.last_received_s = time.monotonic()
        return True

    def _receive(self, flags: int) -> int:
        """Receive some of the missing bytes, and the shared memory that a header may offer."""
        if not self._is_shared or self._memory is not None or self._header is not None:
            return self._sock.recv_into(self._missing, 0, flags)
        room = socket.CMSG_LEN(_DESCRIPTOR.size)  # of one descriptor, without room for a second
        flags |= socket.MSG_CMSG_CLOEXEC
        count, extras, _, _ = self._sock.recvmsg_into([self._missing], room, flags)
        for level, kind, data in extras:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                (descriptor,) = _DESCRIPTOR.unpack_from(data)
                self._memory = SharedMemoryReader(descriptor, self._limits.max_payload_bytes)
        return count


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.numpy().data


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
