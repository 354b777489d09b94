"""The connection between a worker and the host that uses it.

Each end sends a sign of life every second, so that each notices when the other is lost: at once
where the connection ends, else after the time limit. What passes is JSON, after the handshake of
``llmpq.dist.transport.endpoint``. Needs no torch.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from typing import Any

from llmpq.dist.transport.endpoint import receive_json, send_json
from llmpq.errors import StageError
from llmpq.spec.fields import Fields

CONTROL = b"worker"
"""Purpose of a connection that asks for devices and starts ranks."""
LINK = b"worker link"
"""Purpose of a connection whose speed is measured."""
LEAVE = "leave"
"""Kind of the last message of a host that ends."""
LEAVE_S = 2.0
"""How long the other end may take to read it."""
ALIVE_S = 1.0
"""Seconds between two signs of life."""
MAX_PLAN_BYTES = 1 << 26
_ALIVE = "alive"

Message = dict[str, Any]


class Connection:
    """One end of a socket between a worker and the host that uses it.

    Args:
        sock: authenticated.
        name: of the other end, for messages.
        timeout_s: without a sign of life for so long, the other end is lost.

    Attributes:
        name: of the other end.
        lost: why the other end is lost, ``None`` while it is there.
    """

    def __init__(self, sock: socket.socket, name: str, timeout_s: float) -> None:
        self.name = name
        self.lost: str | None = None
        self._timeout_s = timeout_s
        self._sock = sock
        # Deadlines of reading and writing are set on sockets of their own.
        self._out = sock.dup()
        self._sending = threading.Lock()
        self._received: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._heard = threading.Condition()
        self._count = 0  # messages received
        self._closed = threading.Event()
        for target in (self._read, self._send_signs_of_life):
            threading.Thread(target=target, daemon=True, name=f"worker {name}").start()

    def send(self, kind: str, **fields: object) -> None:
        """Send a message; ``StageError`` if the other end is lost."""
        try:
            with self._sending:
                send_json(self._out, {"kind": kind, **fields}, time.monotonic() + self._timeout_s)
        except OSError as error:
            self._lose(f"cannot be reached: {error.strerror or error}")
        self._check()

    def receive(self, timeout_s: float) -> Message | None:
        """Return the next message, ``None`` without one in time.

        Raises:
            StageError: the other end is lost, and all that it sent was returned.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(queue.Empty):
                return self._received.get_nowait()
            self._check()
            with self._heard:
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    return None
                if self._received.empty() and self.lost is None:
                    self._heard.wait(left_s)

    def is_there(self) -> bool:
        """Wait for a sign of life; return whether one came before the other end was lost."""
        with self._heard:
            before = self._count
            self._heard.wait_for(lambda: self._count > before or self.lost is not None)
        return self.lost is None

    def leave(self) -> None:
        """Say that no message follows, and close once the other end has read it."""
        with contextlib.suppress(StageError):  # the other end is lost
            self.send(LEAVE)
        # Closing a socket with unread bytes would discard what the other end has not read.
        with self._heard:
            self._heard.wait_for(lambda: self.lost is not None, LEAVE_S)
        self.close()

    def close(self) -> None:
        """End the connection, which the other end notices at once."""
        self._closed.set()
        self._lose("closed")
        self._out.close()
        self._sock.close()

    def _check(self) -> None:
        if self.lost is not None:
            raise StageError(f"{self.name}: {self.lost}")

    def _read(self) -> None:
        while self.lost is None:
            try:
                value = receive_json(self._sock, time.monotonic() + self._timeout_s, MAX_PLAN_BYTES)
                kind = Fields(value, self.name).text("kind")
            except TimeoutError:
                self._lose(f"gave no sign of life for {self._timeout_s:g} s")
                return
            except OSError:
                self._lose("closed the connection")
                return
            except Exception as error:  # not JSON, or no message
                self._lose(str(error))
                return
            if kind != _ALIVE:
                self._received.put(value)
            with self._heard:
                self._count += 1
                self._heard.notify_all()

    def _send_signs_of_life(self) -> None:
        while not self._closed.wait(ALIVE_S):
            try:
                self.send(_ALIVE)
            except StageError:
                return

    def _lose(self, why: str) -> None:
        """Note that the other end is lost; end both directions, which wakes the reading thread."""
        with self._heard:
            if self.lost is None:
                self.lost = why
            self._heard.notify_all()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
