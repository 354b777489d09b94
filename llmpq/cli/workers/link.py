"""Latency and bandwidth of a link between two hosts, measured through a socket as the runtime's.

The end that connected measures: round trips of one byte, then messages of growing size in each
direction until one takes long enough. The other end answers.
"""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass
from statistics import median

from llmpq.dist.transport.endpoint import receive, send_all
from llmpq.errors import StageError

ROUND_TRIPS = 16
FIRST_BYTES, MOST_BYTES = 1 << 18, 1 << 26
LONG_S = 0.1
"""A message that takes so long is long enough for its bandwidth."""
LEAST_S = 1e-6
_PART = bytes(1 << 16)
_REQUEST = struct.Struct("<cQ")
_UP, _DOWN = b"u", b"d"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """A link as it was measured.

    Attributes:
        latency_s: half a round trip.
        out_bytes_per_s, in_bytes_per_s: from the end that measures, and to it.
    """

    latency_s: float
    out_bytes_per_s: float
    in_bytes_per_s: float


def measure_link(sock: socket.socket, timeout_s: float) -> MeasuredLink:
    """Measure the link of a connection whose other end answers, and close it.

    Raises:
        OSError: the other end is lost, or took longer than ``timeout_s`` for one message.
    """
    with sock:
        trips_s = [_seconds_of(sock, _UP, 1, timeout_s) for _ in range(ROUND_TRIPS)]
        trip_s = median(trips_s)
        out, back = (_bandwidth(sock, way, trip_s, timeout_s) for way in (_UP, _DOWN))
    return MeasuredLink(latency_s=trip_s / 2, out_bytes_per_s=out, in_bytes_per_s=back)


def answer_link(sock: socket.socket, timeout_s: float) -> None:
    """Answer the end that measures until it closes the connection.

    Raises:
        OSError: the other end has closed the connection, or is lost.
        StageError: it asks for what is not measured.
    """
    with sock:
        while True:
            deadline_s = time.monotonic() + timeout_s
            way, size = _REQUEST.unpack(receive(sock, _REQUEST.size, deadline_s))
            if size > MOST_BYTES or way not in (_UP, _DOWN):
                raise StageError(f"found a message of {size} bytes, expected at most {MOST_BYTES}")
            if way == _UP:
                _take(sock, size, deadline_s)
                send_all(sock, b"1", deadline_s)
            else:
                _give(sock, size, deadline_s)


def _bandwidth(sock: socket.socket, way: bytes, trip_s: float, timeout_s: float) -> float:
    """Return the bytes a second of one direction."""
    size = FIRST_BYTES
    while True:
        seconds = _seconds_of(sock, way, size, timeout_s)
        if seconds >= LONG_S or size >= MOST_BYTES:
            return size / max(LEAST_S, seconds - trip_s)
        size *= 2


def _seconds_of(sock: socket.socket, way: bytes, size: int, timeout_s: float) -> float:
    """Return the seconds from sending a request until its answer is here."""
    start_s = time.monotonic()
    deadline_s = start_s + timeout_s
    send_all(sock, _REQUEST.pack(way, size), deadline_s)
    if way == _UP:
        _give(sock, size, deadline_s)
        receive(sock, 1, deadline_s)
    else:
        _take(sock, size, deadline_s)
    return time.monotonic() - start_s


def _give(sock: socket.socket, size: int, deadline_s: float) -> None:
    for done in range(0, size, len(_PART)):
        send_all(sock, _PART[: size - done], deadline_s)


def _take(sock: socket.socket, size: int, deadline_s: float) -> None:
    while size:
        size -= len(receive(sock, min(size, len(_PART)), deadline_s))
