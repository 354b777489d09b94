"""Endpoints: where a rank listens, and the handshake that admits a connection.

An endpoint is a unix socket in a folder that only this user can enter, or one TCP address. Both
ends of a new connection first prove that they hold the same token: each sends a random nonce and an
HMAC-SHA256 over both nonces, so the token is never sent and a proof cannot be replayed. Nothing
else is parsed before. Traffic after the handshake is neither encrypted nor signed: across a network
that others can change, run the ranks inside a private one.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import json
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmpq.errors import SpecError, StageError

HANDSHAKE_S = 5.0
"""Time limit of a handshake."""
MAX_PENDING_HANDSHAKES = 64
"""Handshakes at once; further connections are closed."""
MAX_MESSAGE_BYTES = 64 * 1024
"""The longest JSON text; a larger announced size is an error before anything is allocated."""
RETRY_S = 0.02
BACKLOG = 128
MAGIC = b"llmpq-1\n"
NONCE_BYTES = 16
MIN_TOKEN_BYTES = 16
PROOF_BYTES = 32
_SIZE = struct.Struct("<I")


class AuthenticationError(StageError):
    """The other end holds another token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a rank listens: the path of a unix socket, or host and port."""

    path: str | None = None
    address: tuple[str, int] | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[socket.socket]:
        """Listen here while the context lasts; ``StageError`` if that is not possible."""
        try:
            listener = self._listen()
        except OSError as error:
            where = "its socket" if self.address is None else "{}:{}".format(*self.address)
            raise StageError(f"cannot listen at {where}: {error.strerror or error}") from None
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes a blocked accept; close does not
            listener.close()
            if self.path is not None:
                Path(self.path).unlink(missing_ok=True)

    def _listen(self) -> socket.socket:
        if self.address is not None:
            found = socket.getaddrinfo(self.address[0], None, type=socket.SOCK_STREAM)
            return socket.create_server(self.address, family=found[0][0], backlog=BACKLOG)
        listener = socket.socket(socket.AF_UNIX)
        with _short_path(self.path) as short:
            listener.bind(short)
        listener.listen(BACKLOG)
        return listener

    def connect(self, timeout_s: float) -> socket.socket:
        """Return a connected stream."""
        if self.address is not None:
            sock = socket.create_connection(self.address, timeout=timeout_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(timeout_s)
        try:
            with _short_path(self.path) as short:
                sock.connect(short)
        except OSError:
            sock.close()
            raise
        return sock

    def connect_authenticated(
        self, token: bytes, purpose: bytes, deadline_s: float
    ) -> socket.socket:
        """Connect and prove the token for a purpose; retry until the endpoint listens.

        Raises:
            SpecError: the other end holds another token.
            StageError: the deadline passed.
        """
        last: Exception = TimeoutError("not listening")
        while (left_s := deadline_s - time.monotonic()) > 0:
            with contextlib.ExitStack() as stack:
                try:
                    sock = stack.enter_context(self.connect(min(left_s, HANDSHAKE_S)))
                    _prove(sock, token, purpose, min(deadline_s, time.monotonic() + HANDSHAKE_S))
                except AuthenticationError as error:
                    raise SpecError(f"{self.address or 'rendezvous'}: {error}") from None
                except OSError as error:
                    last = error
                else:
                    stack.pop_all()
                    return sock
            time.sleep(RETRY_S)
        where = self.address or "its socket"
        raise StageError(f"could not reach the other rank at {where}: {last}")


class Acceptor:
    """Admits connections that prove the token for one of the purposes, and closes all others.

    Each handshake has a thread. The acceptor ends with its listeners.

    Args:
        listeners: where connections arrive.
        token: to prove.
        purposes: that are admitted.
        on_refused: called with the host of a connection that proves another token.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        token: bytes,
        purposes: Sequence[bytes],
        on_refused: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._token = token
        self._purposes = purposes
        self._on_refused = on_refused
        self._admitted: queue.SimpleQueue[tuple[bytes, socket.socket]] = queue.SimpleQueue()
        self._pending = threading.BoundedSemaphore(MAX_PENDING_HANDSHAKES)
        for listener in listeners:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def take(self, deadline_s: float) -> tuple[bytes, socket.socket]:
        """Return the purpose of the next admitted connection, and the connection."""
        try:
            return self._admitted.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            raise TimeoutError("no connection in time") from None

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if error.errno in (errno.EBADF, errno.EINVAL):
                    return  # the listener is closed
                time.sleep(RETRY_S)  # a peer that went away, or too many open files for a while
                continue
            if not self._pending.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._admit, args=(sock,), daemon=True).start()

    def _admit(self, sock: socket.socket) -> None:
        try:
            deadline_s = time.monotonic() + HANDSHAKE_S
            purpose = _verify(sock, self._token, self._purposes, deadline_s)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._admitted.put((purpose, sock))
        except (OSError, StageError) as error:
            if isinstance(error, AuthenticationError):
                with contextlib.suppress(OSError):  # it has gone
                    self._on_refused(str(sock.getpeername()[0]))
            sock.close()
        finally:
            self._pending.release()


def _prove(sock: socket.socket, token: bytes, purpose: bytes, deadline_s: float) -> None:
    """Do the handshake as the end that connected."""
    own = os.urandom(NONCE_BYTES)
    send_all(sock, MAGIC + own, deadline_s)
    nonces = own + receive(sock, NONCE_BYTES, deadline_s)
    send_all(sock, _proof(token, b"connect", purpose, nonces), deadline_s)
    try:
        answer = receive(sock, PROOF_BYTES, deadline_s)
    except ConnectionError:
        raise AuthenticationError(
            "found a token refused, expected the same on every host"
        ) from None
    if not hmac.compare_digest(answer, _proof(token, b"listen", purpose, nonces)):
        raise StageError("found a listener without the token, expected a rank of this run")


def _verify(
    sock: socket.socket, token: bytes, purposes: Sequence[bytes], deadline_s: float
) -> bytes:
    """Do the handshake as the end that listens; return the purpose of the connection.

    No proof is sent to a peer without the token.
    """
    hello = receive(sock, len(MAGIC) + NONCE_BYTES, deadline_s)
    if hello[: len(MAGIC)] != MAGIC:
        raise StageError("found other bytes, expected the greeting of a rank")
    nonces = hello[len(MAGIC) :] + (own := os.urandom(NONCE_BYTES))
    send_all(sock, own, deadline_s)
    proof = receive(sock, PROOF_BYTES, deadline_s)
    for purpose in purposes:
        if hmac.compare_digest(proof, _proof(token, b"connect", purpose, nonces)):
            send_all(sock, _proof(token, b"listen", purpose, nonces), deadline_s)
            return purpose
    raise AuthenticationError("found a connection without the token, expected a rank of this run")


def _proof(token: bytes, role: bytes, purpose: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token, b"\0".join((role, purpose)) + b"\0" + nonces, "sha256")


def send_json(sock: socket.socket, value: object, deadline_s: float) -> None:
    """Send the size of a JSON text, then the text."""
    data = json.dumps(value).encode()
    send_all(sock, _SIZE.pack(len(data)) + data, deadline_s)


def receive_json(
    sock: socket.socket, deadline_s: float, limit_bytes: int = MAX_MESSAGE_BYTES
) -> Any:
    """Receive a JSON value; ``StageError`` if the text is too long or not JSON."""
    (size,) = _SIZE.unpack(receive(sock, _SIZE.size, deadline_s))
    if size > limit_bytes:
        raise StageError(f"found a message of {size} bytes, expected at most {limit_bytes}")
    try:
        return json.loads(receive(sock, size, deadline_s))
    except (ValueError, RecursionError):
        raise StageError("found a message that is not JSON, expected that of a rank") from None


def send_all(sock: socket.socket, data: bytes, deadline_s: float) -> None:
    """Send all bytes before the deadline."""
    _set_deadline(sock, deadline_s)
    sock.sendall(data)


def receive(sock: socket.socket, size: int, deadline_s: float) -> bytes:
    """Receive exactly ``size`` bytes before the deadline."""
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
        raise TimeoutError("deadline passed")
    sock.settimeout(left_s)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address reaches this host only."""
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return all(ipaddress.ip_address(item[4][0]).is_loopback for item in found)


def is_loopback_name(host: str) -> bool:
    """Return whether a name or an address is this host's own, without asking for its address."""
    if host.rstrip(".").lower() == "localhost" or host.lower().endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_token(path: Path) -> bytes:
    """Read a shared secret; ``SpecError`` if others may read it or it is too short."""
    try:
        mode, token = path.stat().st_mode, path.read_bytes().strip()
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None
    if mode & 0o077:
        raise SpecError(f"{path}: found mode {mode & 0o777:o}, expected 600: it is a secret")
    if len(token) < MIN_TOKEN_BYTES:
        raise SpecError(
            f"{path}: found a token of {len(token)} bytes, expected at least {MIN_TOKEN_BYTES}"
        )
    return token


@contextlib.contextmanager
def _short_path(path: str | None) -> Iterator[str]:
    """Name a file through its folder's descriptor: a unix socket's path has at most 107 bytes."""
    assert path is not None
    folder = os.open(Path(path).parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{Path(path).name}"
    finally:
        os.close(folder)
