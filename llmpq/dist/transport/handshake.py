"""Handshake: two ends of a new connection prove to each other that they hold the same token.

Before that, nothing that came is parsed: it is a magic word and random bytes of fixed sizes. Each
end sends a fresh random number and answers the other's with an HMAC over both, so that the token
never travels and an answer is of no use twice. What travels afterwards is neither encrypted nor
signed: over a network that others can change, run the ranks inside a private one.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from llmpq.errors import StageError

MAGIC = b"llmpq-1\n"
NONCE_BYTES = 16
PROOF_BYTES = 32
MAX_MESSAGE_BYTES = 64 * 1024
"""The longest JSON text; a size above it ends the connection before anything is allocated."""
_SIZE = struct.Struct("<I")


class AuthenticationError(StageError):
    """The other end hung up on our proof: it holds another token."""


def greet(sock: socket.socket, token: bytes, purpose: bytes, deadline_s: float) -> None:
    """Prove the token as the end that connected, and have the other prove it.

    Args:
        sock: a connected stream.
        token: the shared secret; empty where nobody else can connect.
        purpose: what the connection is for; both ends must say the same.
        deadline_s: on the monotonic clock.

    Raises:
        AuthenticationError: the other end did not accept the proof.
        OSError: the connection broke or took too long.
        StageError: the other end is not a rank that holds the token.
    """
    own = os.urandom(NONCE_BYTES)
    send_all(sock, MAGIC + own, deadline_s)
    other = receive(sock, NONCE_BYTES, deadline_s)
    send_all(sock, _proof(token, b"connect", purpose, own + other), deadline_s)
    try:
        answer = receive(sock, PROOF_BYTES, deadline_s)
    except ConnectionError:
        raise AuthenticationError(
            "found a token refused, expected the same on every host"
        ) from None
    if not hmac.compare_digest(answer, _proof(token, b"listen", purpose, own + other)):
        raise StageError("found a listener without the token, expected a rank of this run")


def answer(
    sock: socket.socket, token: bytes, purposes: Sequence[bytes], deadline_s: float
) -> bytes:
    """Prove the token as the end that listens; the other end proves it first.

    Returns:
        which of the purposes the other end came for.

    Raises:
        OSError: the connection broke or took too long.
        StageError: the other end does not hold the token; it is told nothing.
    """
    hello = receive(sock, len(MAGIC) + NONCE_BYTES, deadline_s)
    if hello[: len(MAGIC)] != MAGIC:
        raise StageError("found a stranger's bytes, expected a rank's greeting")
    nonces = hello[len(MAGIC) :] + (own := os.urandom(NONCE_BYTES))
    send_all(sock, own, deadline_s)
    proof = receive(sock, PROOF_BYTES, deadline_s)
    for purpose in purposes:
        if hmac.compare_digest(proof, _proof(token, b"connect", purpose, nonces)):
            send_all(sock, _proof(token, b"listen", purpose, nonces), deadline_s)
            return purpose
    raise StageError("found a connection without the token, expected a rank of this run")


def send_json(sock: socket.socket, value: object, deadline_s: float) -> None:
    """Send a JSON value with its size before it."""
    data = json.dumps(value).encode()
    send_all(sock, _SIZE.pack(len(data)) + data, deadline_s)


def receive_json(sock: socket.socket, deadline_s: float) -> Any:
    """Receive a JSON value.

    Raises:
        OSError: the connection broke or took too long.
        StageError: it is too long, or not JSON.
    """
    (size,) = _SIZE.unpack(receive(sock, _SIZE.size, deadline_s))
    if size > MAX_MESSAGE_BYTES:
        raise StageError(f"found a message of {size} bytes, expected at most {MAX_MESSAGE_BYTES}")
    try:
        return json.loads(receive(sock, size, deadline_s))
    except ValueError:
        raise StageError("found a message that is not JSON, expected a rank's") from None


def send_all(sock: socket.socket, data: bytes, deadline_s: float) -> None:
    """Send all of it before the deadline."""
    _set_deadline(sock, deadline_s)
    sock.sendall(data)


def receive(sock: socket.socket, size: int, deadline_s: float) -> bytes:
    """Receive exactly ``size`` bytes before the deadline, however slowly they trickle."""
    data = b""
    while len(data) < size:
        _set_deadline(sock, deadline_s)
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionResetError("end of stream")
        data += part
    return data


def _set_deadline(sock: socket.socket, deadline_s: float) -> None:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("too slow")
    sock.settimeout(left_s)


def _proof(token: bytes, role: bytes, purpose: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token, b"\0".join((role, purpose)) + b"\0" + nonces, "sha256")
