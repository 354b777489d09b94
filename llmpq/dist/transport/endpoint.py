"""Doors: places where a rank can be reached, and who is let in there.

A door is a unix socket in a folder that only this user can enter, or one address. Whoever connects
proves the token first, within a few seconds; until then nothing of what it sends is parsed.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmpq.dist.transport.handshake import AuthenticationError, answer, greet
from llmpq.errors import SpecError, StageError

HANDSHAKE_S = 5.0
"""How long a connection may take to prove the token."""
MAX_PENDING_HANDSHAKES = 64
"""Connections that may be proving themselves at once; more are hung up on."""
RETRY_S = 0.02
BACKLOG = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a listener stands: a socket file, or an address; exactly one.

    Attributes:
        path: of a unix socket.
        address: host and port.
    """

    path: str | None = None
    address: tuple[str, int] | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[socket.socket]:
        """Listen here, and nowhere else, for as long as the context lasts.

        Raises:
            StageError: the place cannot be listened at.
        """
        try:
            listener = self._listen()
        except OSError as error:
            where = "its socket" if self.address is None else "{}:{}".format(*self.address)
            raise StageError(f"cannot listen at {where}: {error.strerror or error}") from None
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes whoever accepts; closing does not
            listener.close()
            if self.path is not None:
                Path(self.path).unlink(missing_ok=True)

    def _listen(self) -> socket.socket:
        if self.address is not None:
            return socket.create_server(
                self.address, family=_family(self.address[0]), backlog=BACKLOG
            )
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


def reach(
    find: Callable[[], Endpoint], token: bytes, purpose: bytes, deadline_s: float
) -> socket.socket:
    """Connect and prove the token, trying again until the listener is there.

    Args:
        find: returns where the other end listens, as far as is known now.
        token: the shared secret.
        purpose: what the connection is for.
        deadline_s: on the monotonic clock.

    Raises:
        SpecError: the other end holds another token.
        StageError: it cannot be reached.
    """
    last: Exception = TimeoutError("nobody listens")
    place = None
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            place = find()
            sock = place.connect(min(left_s, HANDSHAKE_S))
        except OSError as error:
            last = error
            time.sleep(RETRY_S)
            continue
        try:
            greet(sock, token, purpose, min(deadline_s, time.monotonic() + HANDSHAKE_S))
        except AuthenticationError as error:
            sock.close()
            raise SpecError(f"{place.address or 'rendezvous'}: {error}") from None
        except OSError as error:
            last = error
            sock.close()
            time.sleep(RETRY_S)
        else:
            return sock
    where = None if place is None else place.address or "its socket"
    raise StageError(f"could not reach the other rank at {where}: {last}")


class ConnectionQueue:
    """Lets in the ranks that prove the token, and hangs up on everyone else.

    Args:
        listeners: where they may come.
        token: the shared secret.
        purposes: what they may come for.
    """

    def __init__(
        self, listeners: Sequence[socket.socket], token: bytes, purposes: Sequence[bytes]
    ) -> None:
        self._arrived: queue.SimpleQueue[tuple[socket.socket, bytes]] = queue.SimpleQueue()
        self._waiting: dict[bytes, socket.socket] = {}
        for listener in listeners:
            Acceptor(listener, token, purposes, lambda *found: self._arrived.put(found))

    def take(self, purpose: bytes, limit_s: float) -> socket.socket:
        """Return the connection of who came for a purpose.

        Raises:
            StageError: nobody came in time.
        """
        deadline_s = time.monotonic() + limit_s
        while purpose not in self._waiting:
            try:
                found, what = self._arrived.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise StageError("the rank before this one did not connect") from None
            self._waiting[what] = found
        sock = self._waiting.pop(purpose)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock


class Acceptor:
    """Lets in whoever proves the token; a thread for each that is proving, at most so many."""

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        purposes: Sequence[bytes],
        on_arrival: Callable[[socket.socket, bytes], None],
    ) -> None:
        self._listener = listener
        self._token = token
        self._purposes = purposes
        self._on_arrival = on_arrival
        self._room = threading.BoundedSemaphore(MAX_PENDING_HANDSHAKES)
        threading.Thread(target=self._accept, daemon=True, name="porter").start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # the listener was closed: everyone is there
            if not self._room.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._prove, args=(sock,), daemon=True, name="proof").start()

    def _prove(self, sock: socket.socket) -> None:
        try:
            purpose = answer(sock, self._token, self._purposes, time.monotonic() + HANDSHAKE_S)
            self._on_arrival(sock, purpose)
        except (OSError, StageError, ValueError):
            sock.close()
        finally:
            self._room.release()


def is_loopback(host: str) -> bool:
    """Tell whether a host name or address only reaches this very host."""
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return all(ipaddress.ip_address(item[4][0]).is_loopback for item in found)


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


@contextlib.contextmanager
def _short_path(path: str | None) -> Iterator[str]:
    """A unix socket's path holds 107 bytes: name a deep folder by a descriptor of it."""
    assert path is not None
    folder = os.open(Path(path).parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{Path(path).name}"
    finally:
        os.close(folder)
