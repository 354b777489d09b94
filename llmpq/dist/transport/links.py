"""Links: frames over one stream socket, of which each end is one rank's alone.

Measured on one host, a 16 KiB frame takes 7 us over a unix socket, where gloo takes 80, and 2 ms
when every core computes: gloo's own threads must be woken first. So a link has no thread. What the
kernel takes at once is sent by whoever sends; who waits for a frame reads it himself.

On one host large payloads lie in memory that both ends share (``dist.arena``), offered with the
header of the first of them: a link that never sends one has none.

Neither end trusts the other: a header's size is fixed, what it announces is checked against the
run's limits before it is received, and payloads land in one buffer that no message can exceed.
"""

from __future__ import annotations

import itertools
import select
import socket
import struct
import time
from collections import deque
from typing import Final

import torch
from torch import Tensor

from llmpq.dist.transport.frames import (
    MAX_TEXT_BYTES,
    Frame,
    FrameLimits,
    Header,
    assemble,
    decode_header,
    encode_header,
)
from llmpq.dist.transport.shared_memory import ArenaReader, ArenaWriter
from llmpq.spec.runtime_constants import SHARED_BUFFERS, SHARED_FROM_BYTES

BUFFER_BYTES: Final = 8 << 20
"""Bytes on their way for which no thread must be woken: some micro-batches of decode."""
_MS: Final = 1000.0
_TIMEVAL: Final = struct.Struct("@ll")
_DESCRIPTOR: Final = struct.Struct("@i")


class LinkClosedError(Exception):
    """The other end of a link is gone; whoever knows its name says so."""


class FrameWriter:
    """The sending end. Nothing here waits for the peer.

    Args:
        sock: connected stream; taken over.
        limits: of this run's frames.
        is_shared: whether large payloads may lie in memory that both ends share, on one host.
    """

    def __init__(
        self, sock: socket.socket, limits: FrameLimits, *, is_shared: bool = False
    ) -> None:
        sock.setblocking(False)
        if sock.family == socket.AF_UNIX:
            # The kernel grants what it may; TCP sizes its own buffers by what the network needs.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self._sock = sock
        self._limits = limits
        self._sent = 0
        self._rest: deque[memoryview] = deque()
        self._is_shared = is_shared and sock.family == socket.AF_UNIX
        self._arena: ArenaWriter | None = None
        self._offer: memoryview | None = None  # the header with which the arena is offered

    def put(self, frame: Frame) -> None:
        """Send what the kernel takes of a frame; :meth:`flush` sends the rest.

        Raises:
            LinkClosedError: the peer is gone.
        """
        payload, had_arena = frame.payload, self._arena is not None
        place = 0 if frame.hidden is None or payload is None else self._shared_at(payload)
        header = memoryview(encode_header(frame, self._limits, self._sent, place))
        self._sent += 1
        self._rest.append(header)
        if place and not had_arena:
            self._offer = header
        if payload is not None and not place:
            self._rest.append(_bytes_of(payload))
        self.flush()

    def flush(self) -> bool:
        """Send what the kernel takes; tell whether nothing is left.

        Raises:
            LinkClosedError: the peer is gone.
        """
        while self._rest:
            try:
                count = self._send()
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                raise LinkClosedError(str(error)) from None
            self._drop(count)
        return True

    def wait(self, timeout_s: float | None, wake: int, *, for_room: bool) -> None:
        """Wait until the descriptor ``wake`` is readable, or the kernel takes more if asked."""
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        if for_room:
            poll.register(self._sock, select.POLLOUT)
        poll.poll(None if timeout_s is None else timeout_s * _MS)

    def drain(self, silence_s: float) -> bool:
        """Send all that is left; tell whether the peer took it, never silent for so long.

        Raises:
            LinkClosedError: the peer is gone.
        """
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        while not self.flush():
            if not poll.poll(silence_s * _MS):
                return False
        return True

    def close(self, timeout_s: float) -> None:
        """Give the peer ``timeout_s`` seconds to take the rest, and hang up."""
        deadline = time.monotonic() + timeout_s
        try:
            poll = select.poll()
            poll.register(self._sock, select.POLLOUT)
            while not self.flush() and (left_s := deadline - time.monotonic()) > 0:
                poll.poll(left_s * _MS)
        except LinkClosedError:
            self._rest.clear()
        self._sock.close()
        if self._offer is not None and self._arena is not None:
            self._arena.handed_over()

    def _shared_at(self, payload: Tensor) -> int:
        """Put a large payload where the peer can read it; return its place, 0 when it must follow.

        The memory is made for the first of them.
        """
        if not self._is_shared or payload.numel() < SHARED_FROM_BYTES:
            return 0
        if self._arena is None:
            self._arena = ArenaWriter(self._limits.max_payload_bytes)
        return self._arena.put(payload)

    def _send(self) -> int:
        """Send what the kernel takes of the next two parts, the offer apart; return its bytes."""
        first, *others = itertools.islice(self._rest, 2)
        if first is self._offer and self._arena is not None:
            count = socket.send_fds(self._sock, [first], [self._arena.fileno])
            self._offer = None
            self._arena.handed_over()
            return count
        return self._sock.sendmsg([first, *(one for one in others if one is not self._offer)])

    def _drop(self, count: int) -> None:
        """Forget the first ``count`` bytes of the rest."""
        while count:
            first = self._rest[0]
            if count < len(first):
                self._rest[0] = first[count:]
                return
            count -= len(first)
            self._rest.popleft()


class FrameReader:
    """The receiving end. A frame's tensor is a view of the buffer that the next one lands in.

    Args:
        sock: connected stream; taken over.
        limits: of this run's frames.
        timeout_s: the longest wait for a payload to go on.
        is_shared: whether the peer may offer memory for large payloads.

    Attributes:
        heard_s: when something was last received, on the monotonic clock.
    """

    def __init__(
        self,
        sock: socket.socket,
        limits: FrameLimits,
        timeout_s: float,
        *,
        is_shared: bool = False,
    ) -> None:
        sock.setblocking(True)
        whole_s = int(timeout_s)
        limit = _TIMEVAL.pack(whole_s, int((timeout_s - whole_s) * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.heard_s = 0.0
        self._sock = sock
        self._limits = limits
        self._received = 0
        self._header_bytes = bytearray(limits.header_bytes)
        # Pages that no message reaches are never touched.
        self._payload = torch.empty(
            max(limits.max_payload_bytes, MAX_TEXT_BYTES), dtype=torch.uint8
        )
        self._header: Header | None = None
        self._missing = memoryview(self._header_bytes)
        self._is_shared = is_shared and sock.family == socket.AF_UNIX
        self._arena: ArenaReader | None = None

    def take(self, *, is_waiting: bool = False) -> Frame | None:
        """Return the next frame when all of it is here, ``None`` when more must come first.

        Args:
            is_waiting: whether to wait, once a header is here, for its payload too. The kernel
                then gathers it; to be woken for each of its parts was measured to take longer
                than the whole.

        Raises:
            LinkClosedError: the peer is gone.
            StageError: what came is not a frame of this run; the link is of no use any more.
        """
        if self._arena is not None:
            self._arena.release()
        while True:
            is_gathering = is_waiting and self._header is not None
            if not self._fill(socket.MSG_WAITALL if is_gathering else socket.MSG_DONTWAIT):
                return None
            if self._header is None:
                places = 0 if self._arena is None else SHARED_BUFFERS
                header = decode_header(
                    bytes(self._header_bytes), self._limits, self._received, places
                )
                self._received += 1
                if self._arena is None or not header.place:
                    self._header = header
                    self._missing = _bytes_of(self._payload)[: header.payload_bytes]
                    continue
                payload: Tensor | None = self._arena.view(header.place, header.payload_bytes)
            else:
                header, self._header = self._header, None
                size = header.payload_bytes
                payload = self._payload[:size] if size else None
            self._missing = memoryview(self._header_bytes)
            return assemble(header, payload, self._limits)

    def fileno(self) -> int:
        """Return the socket's descriptor, for whoever waits for several links."""
        return self._sock.fileno()

    def close(self) -> None:
        """Hang up."""
        self._sock.close()

    def _fill(self, flags: int) -> bool:
        """Receive into what is missing; tell whether nothing is."""
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
            self.heard_s = time.monotonic()
        return True

    def _receive(self, flags: int) -> int:
        """Receive into what is missing; with a header memory may be offered."""
        if not self._is_shared or self._arena is not None or self._header is not None:
            return self._sock.recv_into(self._missing, 0, flags)
        room = socket.CMSG_LEN(_DESCRIPTOR.size)  # one, and no padding that holds a second
        flags |= socket.MSG_CMSG_CLOEXEC
        count, extras, _, _ = self._sock.recvmsg_into([self._missing], room, flags)
        for level, kind, data in extras:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                (fileno,) = _DESCRIPTOR.unpack_from(data)
                self._arena = ArenaReader(fileno, self._limits.max_payload_bytes)
        return count


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.numpy().data
