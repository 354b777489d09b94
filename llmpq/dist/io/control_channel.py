"""ControlChannel: JSON objects, one a line, between a session and the master's process.

Messages to the master have a ``kind``: ``batch`` (``prompts``, ``streams``) starts a batch of
requests, ``cancel`` ends it early. Messages from the master: ``ready`` once all ranks are
loaded; then for each batch ``tokens`` after each step when it streams, ``result`` for each finished
request, and at last ``done``, or ``refused`` when a request cannot be served. Needs no torch.
"""

from __future__ import annotations

import json
import select
import socket
from collections import deque
from typing import Any

CHUNK_BYTES = 1 << 18
Message = dict[str, Any]


class ControlChannel:
    """One end of a channel; owns its connected stream.

    Raises:
        EOFError: by ``send`` and ``receive``, once the other end is closed.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lines: deque[bytes] = deque()
        self._rest: list[bytes] = []  # of a line whose end has not arrived

    def send(self, kind: str, **fields: object) -> None:
        """Send a message; blocks while the other end does not read."""
        line = json.dumps({"kind": kind, **fields}).encode()
        try:
            self._sock.sendall(line + b"\n")
        except OSError as error:
            raise EOFError(str(error)) from None

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message, ``None`` when none arrives within ``timeout_s``."""
        while not self._lines:
            if not select.select([self._sock], [], [], timeout_s)[0]:
                return None
            self._read()
        message: Message = json.loads(self._lines.popleft())
        return message

    def hang_up(self) -> None:
        """End the stream in both directions; a blocked call of either end raises ``EOFError``."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end is closed already

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def _read(self) -> None:
        try:
            data = self._sock.recv(CHUNK_BYTES)
        except OSError as error:
            raise EOFError(str(error)) from None
        if not data:
            raise EOFError("end of stream")
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = b"".join([*self._rest, lines[0]])
            self._rest = []
        self._lines.extend(lines)
        self._rest.append(rest)
