"""SocketCommunicator: the ring over stream sockets, unix inside a host and TCP between hosts.

The calling thread writes what the kernel takes at once and reads what it waits for; one helper
thread, asleep otherwise, writes the rest of large frames and the heartbeats. Silence counts only
during a wait. On one host, large payloads lie in memory that both ends share
(``transport.shared_memory``), offered with the header of the first of them.

Neither end trusts the other: a header has a fixed size, what it announces is checked against the
run's limits before anything is received, and payloads are received into one bounded buffer.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from llmpq.dist.io.job import BEATS_PER_TIMEOUT
from llmpq.dist.transport.errors import peer_closed, peer_silent
from llmpq.dist.transport.frames import (
    LAST_KINDS,
    MAX_TEXT_BYTES,
    Frame,
    FrameKind,
    FrameLimits,
    Header,
    assemble,
    decode_header,
    encode_header,
    encode_tables,
)
from llmpq.dist.transport.shared_memory import SharedMemoryReader, SharedMemoryWriter
from llmpq.errors import StageError
from llmpq.spec.runtime_constants import SHARED_BUFFERS, SHARED_FROM_BYTES

SEND_BUFFER_BYTES: Final = 8 << 20
"""Bytes that the kernel may hold for a unix socket: some micro-batches of decode."""
CLOSE_TIMEOUT_S: Final = 1.0
"""How long a closing rank waits for the next one to take what was sent to it."""
PAUSE_S: Final = 0.5
"""A wait that took this much longer than asked for means that this process itself was stopped."""
_MS: Final = 1000.0
_TIMEVAL: Final = struct.Struct("@ll")
_DESCRIPTOR: Final = struct.Struct("@i")


class LinkClosedError(Exception):
    """The other end of a link is gone; the caller, which knows its name, reports it."""


class FrameWriter:
    """The sending end of a link, which takes over a connected stream.

    Only ``drain`` and ``close`` wait for the peer. On one host, large payloads may lie in shared
    memory if ``is_shared``. All methods raise ``LinkClosedError`` once the peer is gone.
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


class FrameReader:
    """The receiving end of a link, which takes over a connected stream.

    A frame's tensor is valid until the next frame is read. ``timeout_s`` limits the wait for the
    rest of a payload; the peer may offer shared memory if ``is_shared``.

    Attributes:
        last_received_s: when bytes last arrived, on the monotonic clock.
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
        """Return the next frame if all of it is here, else ``None``.

        ``is_waiting`` waits for a payload whose header is here, which the kernel then gathers.

        Raises:
            LinkClosedError: the peer is gone.
            StageError: the bytes are not a frame of this run; the link cannot be used any more.
        """
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


class SocketCommunicator:
    """One rank's part of a ring of ``ranks``, by default of all.

    Args:
        outgoing: stream to the next rank; taken over.
        incoming: stream from the previous rank; taken over.
        timeout_s: longest silence of a peer.
    """

    def __init__(  # noqa: PLR0913  two streams, and the ranks at their ends
        self,
        *,
        rank: int,
        names: Sequence[str],
        limits: FrameLimits,
        outgoing: socket.socket,
        incoming: socket.socket,
        timeout_s: float,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.rank = rank
        self.names = names
        self.ranks: Sequence[int] = range(len(names)) if ranks is None else ranks
        index = self.ranks.index(rank)
        self._next = self.ranks[(index + 1) % len(self.ranks)]
        self._previous = self.ranks[index - 1]
        self._timeout_s = timeout_s
        self._reader = FrameReader(incoming, limits, timeout_s, is_shared=True)
        self._arrived: Frame | None = None
        self._failure: StageError | None = None
        self._writer = FrameWriter(outgoing, limits, is_shared=True)
        self._lock = threading.Lock()  # of the writer and the five below
        self._has_backlog = False
        self._is_lost = False
        self._is_last_sent = False
        self._is_closed = False
        self._last_sent_s = time.monotonic()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run_writer, daemon=True, name="link")
        self._thread.start()

    def send(self, frame: Frame) -> None:
        """Start sending to the next rank."""
        with self._lock:
            self._write(frame)
            self._is_last_sent |= frame.kind in LAST_KINDS
            is_lost, has_backlog = self._is_lost, self._has_backlog
        if is_lost:
            raise peer_closed(self.names[self._next], self._next)
        if has_backlog:
            os.eventfd_write(self._wake, 1)

    def has_frame(self) -> bool:
        """Return whether ``recv`` would return or raise at once."""
        return self.poll(is_waiting=False)

    def await_frame(self, longest_s: float) -> bool:
        """Wait until ``recv`` would return or raise at once; return whether it would."""
        return wait_for_any([self], longest_s) is not None

    def recv(self) -> Frame:
        """Return the next frame, waiting for it; its tensor is valid until the next call."""
        wait_for_any([self])
        if self._failure is not None:
            raise self._failure  # the next call raises it again
        frame, self._arrived = self._arrived, None
        assert frame is not None
        return frame

    def remaining_s(self, start_s: float) -> float:
        """Return how long the previous rank may stay silent in a wait that began at ``start_s``.

        Without time left, :meth:`recv` raises an error.
        """
        left_s = max(start_s, self._reader.last_received_s) + self._timeout_s - time.monotonic()
        if left_s <= 0:
            self._failure = peer_silent(self.names[self._previous], self._previous, self._timeout_s)
        return left_s

    def poll(self, *, is_waiting: bool = True) -> bool:
        """Read a frame as :meth:`FrameReader.read`; return whether ``recv`` would return."""
        if self._arrived is not None or self._failure is not None:
            return True
        try:
            frame = self._reader.read(is_waiting=is_waiting)
            while frame is not None and frame.kind is FrameKind.HEARTBEAT:
                frame = self._reader.read(is_waiting=is_waiting)
            self._arrived = frame
        except LinkClosedError:
            self._failure = peer_closed(self.names[self._previous], self._previous)
        except StageError as error:
            self._failure = error
        return self._arrived is not None or self._failure is not None

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when bytes arrive."""
        return self._reader.fileno()

    def close(self) -> None:
        """Finish sending and close both connections."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        self._writer.close(CLOSE_TIMEOUT_S)
        self._reader.close()

    def _write(self, frame: Frame | None) -> None:
        """Send a frame, or more of the backlog; the lock is held."""
        try:
            if frame is not None:
                self._writer.write(frame)
                self._last_sent_s = time.monotonic()
            self._has_backlog = not self._writer.flush()
        except LinkClosedError:
            self._is_lost = True
            self._has_backlog = False

    def _run_writer(self) -> None:
        """Send the rest of large frames, and heartbeats if nothing else is sent."""
        interval_s = self._timeout_s / BEATS_PER_TIMEOUT
        while True:
            with self._lock:
                if self._is_lost or self._is_closed:
                    return  # ``close`` sends the rest
                now_s = time.monotonic()
                # With a backlog, the peer has not read all that came before it.
                is_quiet = not (self._has_backlog or self._is_last_sent)
                is_due = is_quiet and now_s - self._last_sent_s >= interval_s
                self._write(Frame(kind=FrameKind.HEARTBEAT) if is_due else None)
                left_s = max(0.0, self._last_sent_s + interval_s - now_s) if is_quiet else None
                has_backlog = self._has_backlog
            self._writer.wait(left_s, self._wake, for_room=has_backlog)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)


def wait_for_any(
    rings: Sequence[SocketCommunicator], longest_s: float = math.inf
) -> SocketCommunicator | None:
    """Return the first ring whose ``recv`` would return at once; ``None`` after ``longest_s``."""
    start_s = time.monotonic()
    end_s = start_s + longest_s
    poll: select.poll | None = None
    while True:
        for ring in rings:
            if ring.poll():
                return ring
        asked_s = time.monotonic()
        left_s = min(ring.remaining_s(start_s) for ring in rings)
        if left_s <= 0:
            continue  # a ring now has the error of a silent peer
        if asked_s >= end_s:
            return None
        left_s = min(left_s, end_s - asked_s)
        if poll is None:
            poll = select.poll()
            for ring in rings:
                poll.register(ring.fileno(), select.POLLIN)
        poll.poll(left_s * _MS)
        if time.monotonic() - asked_s > left_s + PAUSE_S:
            start_s = time.monotonic()  # this process was stopped, not the peer
