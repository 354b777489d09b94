"""Answers of a replica that are not what HTTP asks for: valid ones with seeded damage."""

from __future__ import annotations

import random
from collections.abc import Callable

BODY = b'{"from": "a damaged answer"}'
EVENTS = b'data: {"n": 1}\n\ndata: [DONE]\n\n'
ANSWERS = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    + BODY,
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"%x\r\n%s\r\n0\r\n\r\n" % (len(EVENTS), EVENTS),
)
STATUS_LINES = (
    b"HTTP/1.1 999 Odd", b"HTTP/1.1 099 Odd", b"HTTP/1.1 1000 Odd", b"HTTP/1.1 -1 Odd",
    b"HTTP/1.1 101 Switching Protocols", b"HTTP/1.1 100 Continue", b"HTTP/9.9 200 OK",
    b"HTTP/1.1 200", b"HTTP/1.1", b"200 OK", b"HTTP/1.1 204 No Content", b"HTTP/1.1 700 Odd",
    b"HTTP/1.1 304 Not Modified",
)  # fmt: skip
HEADERS = (
    b"Content-Length: -1", b"Content-Length: 99999999999999999999", b"Content-Length: 5, 6",
    b"Content-Length: 3", b"Content-Length: 900", b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: chunked", b"No colon", b": no name", b"Na me: x", b"X: a\x00b",
    b"X: \xff\xfe", b"X: " + b"y" * 20_000, b"Content-Encoding: gzip", b"Connection: upgrade",
    b"Content-Type: \xe4\xf6", b"Location: http://[", b"Set-Cookie: \x01=;;=", b" folded",
)  # fmt: skip


def malformed(seed: int) -> bytes:
    """Return one answer; equal seeds give equal ones."""
    source = random.Random(seed)
    answer = source.choice(ANSWERS)
    for _ in range(source.randint(1, 3)):
        answer = source.choice(_DAMAGES)(answer, source)
    return answer


def _cut(answer: bytes, source: random.Random) -> bytes:
    return answer[: source.randint(0, len(answer))]


def _replace(answer: bytes, source: random.Random) -> bytes:
    damaged = bytearray(answer)
    for _ in range(source.randint(1, 8) if damaged else 0):
        damaged[source.randrange(len(damaged))] = source.randrange(256)
    return bytes(damaged)


def _repeat(answer: bytes, source: random.Random) -> bytes:
    first, end = sorted(source.randint(0, len(answer)) for _ in range(2))
    return answer[:end] + answer[first:]


def _insert(answer: bytes, source: random.Random) -> bytes:
    at = source.randint(0, len(answer))
    return answer[:at] + source.randbytes(source.randint(1, 40)) + answer[at:]


def _status(answer: bytes, source: random.Random) -> bytes:
    return source.choice(STATUS_LINES) + b"\r\n" + answer.partition(b"\r\n")[2]


def _header(answer: bytes, source: random.Random) -> bytes:
    line, _, rest = answer.partition(b"\r\n")
    return line + b"\r\n" + source.choice(HEADERS) + b"\r\n" + rest


def _chunk(answer: bytes, source: random.Random) -> bytes:
    size = source.choice((b"ffffffffffffffff", b"-5", b"zz", b"", b"5;" + b"x" * 9000, b"0"))
    return answer.replace(b"\r\n\r\n", b"\r\n\r\n" + size + b"\r\n", 1)


def _noise(answer: bytes, source: random.Random) -> bytes:
    return source.randbytes(source.randint(0, 200))


_DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _cut, _replace, _repeat, _insert, _status, _header, _chunk, _noise,
)  # fmt: skip
