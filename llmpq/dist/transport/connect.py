"""Connecting: from a place to meet to a communicator over the fastest transport of every link.

Two ranks that can reach each other's socket files share a unix socket; others a TCP connection,
which listens only on the address by which rank 0 is reached, and only until the ring stands. Gloo
is there for whoever asks for it: it was measured 10 to 200 times slower on small frames and
authenticates nobody.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch lists no exports
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from llmpq.dist.io.job import START_TIMEOUT_S, Rendezvous, Transport
from llmpq.dist.kv.transfer import KVReceiveLink, KVSendLink
from llmpq.dist.transport.communicator import Communicator
from llmpq.dist.transport.endpoint import ConnectionQueue, Endpoint, is_loopback, reach
from llmpq.dist.transport.frames import FrameLimits
from llmpq.dist.transport.rank_channels import make_rank_channels
from llmpq.dist.transport.rendezvous import (
    Announcement,
    PeerTable,
    join_rendezvous,
    serve_rendezvous,
)
from llmpq.dist.transport.topology import Link, Topology, check_transport, one_ring
from llmpq.dist.transport.torch_communicator import TorchCommunicator
from llmpq.errors import SpecError, StageError

MIN_TOKEN_BYTES = 16
LINK_TIMEOUT_S = 30.0
"""How long neighbours may take to connect once everybody has met."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIdentity:
    """One rank, before it knows the others.

    Attributes:
        rank: of this process.
        world_size: number of ranks, at least 2.
        name: what messages call this rank.
        limits: of this run's frames.
        timeout_s: how long a peer may be silent.
    """

    rank: int
    world_size: int
    name: str
    limits: FrameLimits
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ring:
    """A rank's place among the others.

    Attributes:
        communicator: its door.
        transport: what its link to the next rank goes over: ``unix``, ``tcp`` or ``gloo``.
        clock_offset_s: what to add to this rank's ``time.perf_counter`` to get rank 0's.
        clock_error_s: by how much that may be wrong.
        send_links, receive_links: its ends of the links for keys and values (WAA).
    """

    communicator: Communicator
    transport: str
    clock_offset_s: float = 0.0
    clock_error_s: float = 0.0
    send_links: tuple[KVSendLink, ...] = ()
    receive_links: tuple[KVReceiveLink, ...] = ()


def connect(
    me: RankIdentity,
    rendezvous: Rendezvous,
    transport: Transport = "auto",
    topology: Topology | None = None,
) -> Ring:
    """Meet the others and take this rank's place among them.

    Args:
        me: this rank.
        rendezvous: where the ranks find each other.
        transport: what links go over.
        topology: which links there are; by default all ranks follow each other.

    Raises:
        StageError: not all ranks came, or a link could not be made.
        SpecError: the ranks were started for different plans or models, or hold unlike tokens.
    """
    topology = topology or one_ring(me.world_size)
    if transport == "gloo":
        check_transport(transport, topology)
        communicator = TorchCommunicator(
            rank=me.rank,
            world_size=me.world_size,
            name=me.name,
            limits=me.limits,
            rendezvous=rendezvous,
            timeout_s=me.timeout_s,
        )
        return Ring(communicator=communicator, transport="gloo")
    with _private_folder(rendezvous) as folder, contextlib.ExitStack() as open_until_met:
        path = str(folder / f"rank-{me.rank}.sock")
        listeners = [open_until_met.enter_context(Endpoint(path=path).listening())]

        def announce(reached_from: str | None) -> Announcement:
            address = None
            if reached_from is not None:
                place = Endpoint(address=(reached_from, 0))
                listeners.append(open_until_met.enter_context(place.listening()))
                address = (reached_from, int(listeners[-1].getsockname()[1]))
            return Announcement(
                rank=me.rank,
                name=me.name,
                digest=me.limits.digest.hex(),
                host=_host_key(),
                path=path,
                address=address,
            )

        met, token = _meet(me, rendezvous, announce)
        _check_plans(me, met)
        sockets = _make_links(me, met, token, listeners, topology)
        return _take_place(me, met, topology, sockets)


def _make_links(
    me: RankIdentity,
    met: PeerTable,
    token: bytes,
    listeners: Sequence[socket.socket],
    topology: Topology,
) -> dict[Link, socket.socket]:
    """Connect to whoever this rank sends to, while the others connect here."""
    own = [link for link in topology.links if me.rank in (link.source, link.target)]
    purposes = {
        link: f"{link.name} {met.session} {link.source} {link.target}".encode() for link in own
    }
    incoming = [link for link in own if link.target == me.rank]
    arrivals = ConnectionQueue(listeners, token, [purposes[link] for link in incoming])
    sockets = {}
    for link in own:
        if link.source == me.rank:
            place = met.ranks[link.target].place_for(met.ranks[me.rank])
            deadline_s = time.monotonic() + LINK_TIMEOUT_S
            sockets[link] = reach(_at(place), token, purposes[link], deadline_s)
    taken = {link: arrivals.take(purposes[link], LINK_TIMEOUT_S) for link in incoming}
    return sockets | taken


def _at(place: Endpoint) -> Callable[[], Endpoint]:
    return lambda: place


def _take_place(
    me: RankIdentity, met: PeerTable, topology: Topology, sockets: dict[Link, socket.socket]
) -> Ring:
    """Make this rank's doors of its sockets."""
    names = [one.name for one in met.ranks]
    made = make_rank_channels(me.rank, names, me.limits, topology, sockets, me.timeout_s)
    following = next(
        link.target for link in sockets if link.handover is None and link.source == me.rank
    )
    place = met.ranks[following].place_for(met.ranks[me.rank])
    return Ring(
        communicator=made.communicator,
        transport="unix" if place.address is None else "tcp",
        clock_offset_s=met.clock_offset_s,
        clock_error_s=met.clock_error_s,
        send_links=made.send_links,
        receive_links=made.receive_links,
    )


def _meet(
    me: RankIdentity, rendezvous: Rendezvous, announce: Callable[[str | None], Announcement]
) -> tuple[PeerTable, bytes]:
    """Meet in the way that was asked for; return what was learnt, and the token."""
    if rendezvous.from_environment:
        return _meet_by_store(me, announce)
    token = _token(rendezvous)
    place = Endpoint(
        path=None if rendezvous.file is None else str(rendezvous.file), address=rendezvous.address
    )
    if me.rank != 0:
        return join_rendezvous(lambda: place, _by_socket(announce), token, START_TIMEOUT_S), token
    own = announce(None if rendezvous.address is None else rendezvous.address[0])
    with place.listening() as listener:
        return serve_rendezvous(listener, own, me.world_size, token, START_TIMEOUT_S), token


def _meet_by_store(
    me: RankIdentity, announce: Callable[[str | None], Announcement]
) -> tuple[PeerTable, bytes]:
    """Let torchrun's store say where rank 0 listens; the token is as private as that store."""
    store = _torchrun_store(me)
    if me.rank != 0:
        # A store outlives a failed attempt: what it says may be that attempt's, so ask again.
        host, port, text = json.loads(store.get("rendezvous"))
        token = bytes.fromhex(text)
        find = lambda: Endpoint(address=(host, port))  # noqa: E731
        return join_rendezvous(find, _by_socket(announce), token, START_TIMEOUT_S), token
    token = secrets.token_bytes(32)
    host = getattr(store.underlying_store, "host", None) or "127.0.0.1"
    own = announce(host)
    with Endpoint(address=(host, 0)).listening() as listener:
        store.set("rendezvous", json.dumps([host, listener.getsockname()[1], token.hex()]))
        return serve_rendezvous(listener, own, me.world_size, token, START_TIMEOUT_S), token


def _torchrun_store(me: RankIdentity) -> PrefixStore:
    timeout = timedelta(seconds=START_TIMEOUT_S)
    try:
        store, _, _ = next(torch_rendezvous("env://", me.rank, me.world_size, timeout=timeout))
    except (RuntimeError, ValueError, OSError) as error:
        raise StageError(f"rank {me.rank}: could not meet the other ranks: {error}") from None
    store.set_timeout(timeout)
    return PrefixStore("llmpq", store)


def _by_socket(
    announce: Callable[[str | None], Announcement],
) -> Callable[[socket.socket], Announcement]:
    """Announce the address by which rank 0 was reached; none when that was a socket file."""

    def own(sock: socket.socket) -> Announcement:
        return announce(None if sock.family == socket.AF_UNIX else sock.getsockname()[0])

    return own


def _token(rendezvous: Rendezvous) -> bytes:
    """Return the shared secret; a place that only this host or user can reach needs none.

    Raises:
        SpecError: others can reach the place and there is no token, or its file is no good.
    """
    if rendezvous.token_file is None:
        if rendezvous.address is not None and not is_loopback(rendezvous.address[0]):
            raise SpecError(
                f"master_addr: found {rendezvous.address[0]}, which other hosts can reach, and no "
                "token; expected --token_file FILE with the same secret on every host"
            )
        return b""
    return read_token(rendezvous.token_file)


def read_token(path: Path) -> bytes:
    """Read a shared secret.

    Raises:
        SpecError: it cannot be read, others may read it, or it is too short to be a secret.
    """
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


def _check_plans(me: RankIdentity, met: PeerTable) -> None:
    digest = me.limits.digest.hex()
    for other in met.ranks:
        if other.digest != digest:
            raise SpecError(
                f"{me.name}: found that {other.name} runs another plan or model, "
                "expected the same strategy file and configuration on every host"
            )


@contextlib.contextmanager
def _private_folder(rendezvous: Rendezvous) -> Iterator[Path]:
    """Return a folder for socket files: the launcher's, or one of this rank's own until all met."""
    if rendezvous.file is not None:
        yield rendezvous.file.parent
    elif rendezvous.folder is not None:
        yield rendezvous.folder
    else:
        with tempfile.TemporaryDirectory(prefix="llmpq-") as name:
            yield Path(name)


def _host_key() -> str:
    """Return what is equal for processes that see the same network and the same files."""
    parts = [Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()]
    parts += [str(Path(f"/proc/self/ns/{kind}").stat().st_ino) for kind in ("net", "mnt")]
    return ":".join([*parts, str(os.getuid())])
