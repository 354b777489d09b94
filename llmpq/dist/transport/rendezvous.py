"""Meeting: how the ranks of a run find each other, and what they learn there.

Rank 0 listens at one place, a socket in a folder that only this user can enter or the one address
it was given; every other rank connects, proves the token, tells its name, its plan and where its
own link can be reached, and gets everybody's. Nothing listens any more once the ring stands.

The clock of rank 0 is compared on the way, so that traces of several hosts share one time.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from llmpq.dist.transport.endpoint import HANDSHAKE_S, Acceptor, Endpoint, reach
from llmpq.dist.transport.handshake import receive, receive_json, send_all, send_json
from llmpq.errors import StageError
from llmpq.spec.fields import Fields

CLOCK_ROUNDS = 8
_CLOCK = struct.Struct("<d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What a rank tells the others.

    Attributes:
        rank: of the plan.
        name: what messages call it.
        digest: of the plan and the model's configuration, in hexadecimal.
        host: equal for ranks that can reach each other's socket files.
        path: its own socket file.
        address: host and port of its own listener, ``None`` when all ranks share a host.
    """

    rank: int
    name: str
    digest: str
    host: str
    path: str
    address: tuple[str, int] | None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        host, port = self.address or (None, None)
        return asdict(self) | {"address": host, "port": port}

    def place_for(self, other: Announcement) -> Endpoint:
        """Return where ``other`` reaches this rank fastest."""
        if self.host == other.host or self.address is None:
            return Endpoint(path=self.path)
        return Endpoint(address=self.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTable:
    """What a rank knows after the meeting.

    Attributes:
        ranks: everybody's announcement, in order.
        session: random, of this run alone.
        clock_offset_s: what to add to this rank's ``time.perf_counter`` to get rank 0's.
        clock_error_s: by how much that may be wrong, half the fastest round trip.
    """

    ranks: tuple[Announcement, ...]
    session: str
    clock_offset_s: float = 0.0
    clock_error_s: float = 0.0


def serve_rendezvous(
    listener: socket.socket, own: Announcement, world_size: int, token: bytes, limit_s: float
) -> PeerTable:
    """Play rank 0: let everyone in, and tell everyone about everyone.

    Raises:
        StageError: a rank did not come in time.
    """
    guests = _Guests(listener, token)
    try:
        found = guests.gather(own, world_size, time.monotonic() + limit_s)
    except StageError as error:
        guests.tell({"error": str(error)})
        raise
    session = os.urandom(8).hex()
    ranks = tuple(found[rank] for rank in range(world_size))
    guests.tell({"session": session, "ranks": [one.to_json() for one in ranks]})
    return PeerTable(ranks=ranks, session=session)


def join_rendezvous(
    find: Callable[[], Endpoint],
    own: Callable[[socket.socket], Announcement],
    token: bytes,
    limit_s: float,
) -> PeerTable:
    """Play any other rank: connect, tell, and be told.

    Args:
        find: returns where rank 0 listens, as far as is known now.
        own: builds the announcement, knowing by which connection rank 0 is reached.
        token: the shared secret.
        limit_s: how long the whole may take.

    Raises:
        SpecError: rank 0 holds another token.
        StageError: rank 0 cannot be reached, or says that the meeting failed.
    """
    deadline_s = time.monotonic() + limit_s
    with reach(find, token, b"rendezvous", deadline_s) as sock:
        offset_s, error_s = _compare_clocks(sock, deadline_s)
        announced = own(sock)
        try:
            send_json(sock, announced.to_json(), deadline_s)
            # Rank 0 may only now find out that somebody is missing: give it time to say so.
            told = receive_json(sock, deadline_s + HANDSHAKE_S)
        except OSError as error:
            raise StageError(f"{announced.name}: lost rank 0 while meeting: {error}") from None
    fields = Fields(told, "rendezvous")
    if (reason := fields.optional_text("error")) is not None:
        raise StageError(reason)
    met = PeerTable(
        ranks=tuple(_announcement(one) for one in fields.children("ranks")),
        session=fields.text("session"),
        clock_offset_s=offset_s,
        clock_error_s=error_s,
    )
    fields.done()
    return met


class _Guests:
    """Rank 0's side: those that came, with their connections."""

    def __init__(self, listener: socket.socket, token: bytes) -> None:
        self._connections: list[socket.socket] = []
        self._arrived: queue.SimpleQueue[Announcement] = queue.SimpleQueue()
        Acceptor(listener, token, [b"rendezvous"], self._welcome)

    def gather(
        self, own: Announcement, world_size: int, deadline_s: float
    ) -> dict[int, Announcement]:
        """Return everyone's announcement."""
        found = {own.rank: own}
        while len(found) < world_size:
            try:
                one = self._arrived.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                missing = [str(rank) for rank in range(world_size) if rank not in found]
                raise StageError(
                    f"rank {', '.join(missing)} did not start in time (seen from {own.name})"
                ) from None
            if one.rank in found or not 0 < one.rank < world_size:
                raise StageError(
                    f"{one.name}: found rank {one.rank} a second time or out of range, expected "
                    f"each of {world_size} ranks once"
                )
            found[one.rank] = one
        return found

    def tell(self, value: object) -> None:
        """Send a value to everyone who came, and hang up."""
        for sock in self._connections:
            with sock, contextlib.suppress(OSError):
                send_json(sock, value, time.monotonic() + HANDSHAKE_S)

    def _welcome(self, sock: socket.socket, _purpose: bytes) -> None:
        deadline_s = time.monotonic() + HANDSHAKE_S
        for _ in range(CLOCK_ROUNDS):
            receive(sock, 1, deadline_s)
            send_all(sock, _CLOCK.pack(time.perf_counter()), deadline_s)
        one = _announcement(Fields(receive_json(sock, deadline_s), "announcement"))
        self._connections.append(sock)
        self._arrived.put(one)


def _compare_clocks(sock: socket.socket, deadline_s: float) -> tuple[float, float]:
    """Return what to add to this clock to get rank 0's, and by how much it may be wrong."""
    best = (float("inf"), 0.0)
    for _ in range(CLOCK_ROUNDS):
        start = time.perf_counter()
        send_all(sock, b"c", deadline_s)
        (there,) = _CLOCK.unpack(receive(sock, _CLOCK.size, deadline_s))
        end = time.perf_counter()
        best = min(best, (end - start, there - (start + end) / 2))
    return best[1], best[0] / 2


def _announcement(fields: Fields) -> Announcement:
    host, port = fields.optional_text("address"), fields.optional_integer("port", 1, 65535)
    one = Announcement(
        rank=fields.integer("rank"),
        name=fields.text("name"),
        digest=fields.text("digest"),
        host=fields.text("host"),
        path=fields.text("path"),
        address=None if host is None or port is None else (host, port),
    )
    fields.done()
    return one
