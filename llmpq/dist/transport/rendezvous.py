"""Rendezvous: how the ranks of a run find each other, and the connections that follow.

Rank 0 listens at one endpoint: a socket in a folder that only this user can enter, or the one
address it was given. Every other rank connects, proves the token, compares its clock with rank 0's
and sends its name, its plan's digest and its own endpoints; rank 0 sends the table of all ranks
back. The ranks then connect as the topology says: over a unix socket where both see the same files,
else over TCP. Nothing listens once all links are connected.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch lists no exports

from llmpq.dist.io.job import START_TIMEOUT_S, Rendezvous
from llmpq.dist.transport.channels import RankChannels, make_rank_channels
from llmpq.dist.transport.communicator import Links
from llmpq.dist.transport.endpoint import (
    HANDSHAKE_S,
    Acceptor,
    Endpoint,
    is_loopback,
    read_token,
    receive,
    receive_json,
    send_all,
    send_json,
)
from llmpq.dist.transport.frames import FrameLimits
from llmpq.dist.transport.socket_links import SocketLinks
from llmpq.dist.transport.topology import Link, Topology, one_ring
from llmpq.dist.transport.torch_links import (
    CPU,
    TorchLinks,
    gpu_of,
    open_store,
    payload_backend,
)
from llmpq.errors import SpecError, StageError
from llmpq.options.run import Transport
from llmpq.spec.fields import Fields, Rule, from_json, to_json

LINK_TIMEOUT_S = 30.0
"""Time limit for the links between neighbours, once the table of ranks is known."""
CLOCK_ROUNDS = 8
PURPOSE = b"rendezvous"
_CLOCK = struct.Struct("<d")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIdentity:
    """One rank before the rendezvous: its number of ``world_size``, and its name in messages.

    ``device`` is where its hidden states are.
    """

    rank: int
    world_size: int
    name: str
    limits: FrameLimits
    timeout_s: float
    device: torch.device = CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerInfo:
    """What a rank announces.

    Attributes:
        name: of the rank in messages.
        digest: of the plan and the model's configuration, in hexadecimal.
        host: equal for ranks that see the same network and the same files.
        path: of its socket file.
        address, port: of its TCP listener, ``None`` if all ranks share a host.
        gpu: identifier of its GPU, ``None`` if NCCL cannot use one here.
    """

    rank: int
    name: str
    digest: str
    host: str
    path: str
    address: str | None = None
    port: int | None = None
    gpu: str | None = None

    def endpoint_for(self, other: PeerInfo) -> Endpoint:
        """Return the fastest endpoint at which ``other`` reaches this rank."""
        if self.host == other.host or self.address is None or self.port is None:
            return Endpoint(path=self.path)
        return Endpoint(address=(self.address, self.port))


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTable:
    """The result of a rendezvous: every rank in order, and a random name of the run.

    Attributes:
        clock_offset_s: to add to this rank's ``time.perf_counter`` to get rank 0's.
        clock_error_s: bound on the error of the offset: half the fastest round trip.
    """

    peers: tuple[PeerInfo, ...]
    session: str
    clock_offset_s: Annotated[float, Rule(optional=True)] = 0.0
    clock_error_s: Annotated[float, Rule(optional=True)] = 0.0


Describe = Callable[[str | None], PeerInfo]
"""Returns a rank's description, given its address as rank 0 sees it; ``None`` on one host."""


def connect(
    identity: RankIdentity,
    rendezvous: Rendezvous,
    transport: Transport = "auto",
    topology: Topology | None = None,
) -> RankChannels:
    """Find the other ranks and connect to them.

    By default the links are one ring of all ranks.

    Raises:
        StageError: a rank did not start in time, or a link could not be made.
        SpecError: the ranks have different plans, models or tokens.
    """
    topology = topology or one_ring(identity.world_size)
    rank = identity.rank
    with contextlib.ExitStack() as stack:
        folder = rendezvous.private_folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmpq-")))
        path = str(folder / f"rank-{rank}.sock")
        listeners = [stack.enter_context(Endpoint(path=path).listening())]

        def describe(address: str | None) -> PeerInfo:
            """Listen on TCP too where rank 0 is reached through an address of this host."""
            port = None
            if address is not None:
                endpoint = Endpoint(address=(address, 0))
                listeners.append(stack.enter_context(endpoint.listening()))
                port = int(listeners[-1].getsockname()[1])
            return PeerInfo(
                rank=rank,
                name=identity.name,
                digest=identity.limits.digest.hex(),
                host=_host_key(),
                path=path,
                address=address,
                port=port,
                gpu=gpu_of(identity.device),
            )

        table, token = _exchange(identity, rendezvous, describe)
        for peer in table.peers:
            if peer.digest != identity.limits.digest.hex():
                raise SpecError(
                    f"{identity.name}: found that {peer.name} runs another plan or model, or with "
                    "other options of the engine, expected the same strategy file, configuration "
                    "and options on every host"
                )
        names = [peer.name for peer in table.peers]
        if uses_torch(transport, table.peers, topology):
            links: Links = _torch_links(identity, rendezvous, table, topology)
        else:
            links = SocketLinks(rank, _connect_links(rank, table, token, listeners, topology))
        channels = make_rank_channels(
            rank, names, identity.limits, topology, links, identity.timeout_s
        )
        return replace(
            channels, clock_offset_s=table.clock_offset_s, clock_error_s=table.clock_error_s
        )


def uses_torch(transport: Transport, peers: Sequence[PeerInfo], topology: Topology) -> bool:
    """Return whether torch.distributed carries the frames; all ranks find the same.

    ``auto`` takes it where NCCL can connect two ranks of one host. Between hosts it must be asked
    for, because neither gloo nor NCCL checks who connects.
    """
    if transport != "auto":
        return transport != "sockets"
    pairs = ((peers[link.source].gpu, peers[link.target].gpu) for link in topology.links)
    has_nccl = any(payload_backend(*pair) == "nccl" for pair in pairs)
    return has_nccl and len({peer.host for peer in peers}) == 1


def _torch_links(
    identity: RankIdentity, rendezvous: Rendezvous, table: PeerTable, topology: Topology
) -> Links:
    """Return the links of a rank over torch.distributed; gloo listens where the rank did."""
    rank = identity.rank
    return TorchLinks(
        rank=rank,
        topology=topology,
        store=PrefixStore(table.session, open_store(rendezvous, rank, identity.world_size)),
        host=table.peers[rank].address or "127.0.0.1",
        gpus=[peer.gpu for peer in table.peers],
        device=identity.device,
    )


def _connect_links(
    rank: int,
    table: PeerTable,
    token: bytes,
    listeners: Sequence[socket.socket],
    topology: Topology,
) -> dict[Link, socket.socket]:
    """Connect to the ranks that this one sends to, and accept those that send to it."""
    own = {
        f"{link.name} {table.session} {link.source} {link.target}".encode(): link
        for link in topology.links
        if rank in (link.source, link.target)
    }
    incoming = [purpose for purpose, link in own.items() if link.target == rank]
    acceptor = Acceptor(listeners, token, incoming)
    deadline_s = time.monotonic() + LINK_TIMEOUT_S
    sockets = {}
    for purpose, link in own.items():
        if link.source == rank:
            endpoint = table.peers[link.target].endpoint_for(table.peers[rank])
            sockets[link] = endpoint.connect_authenticated(token, purpose, deadline_s)
    while len(sockets) < len(own):
        try:
            purpose, sock = acceptor.take(deadline_s)
        except TimeoutError:
            raise StageError("the rank before this one did not connect") from None
        sockets[own[purpose]] = sock
    return sockets


def _exchange(
    identity: RankIdentity, rendezvous: Rendezvous, describe: Describe
) -> tuple[PeerTable, bytes]:
    """Return the table of all ranks, and the token."""
    rank, world_size = identity.rank, identity.world_size
    store = open_store(rendezvous, rank, world_size) if rendezvous.from_environment else None
    if store is None:
        path = None if rendezvous.file is None else str(rendezvous.file)
        endpoint, token = Endpoint(path=path, address=rendezvous.address), _token(rendezvous)
    else:
        endpoint, token = _endpoint_from_store(rank, store)
    if rank > 0:
        return _join(endpoint, describe, token), token
    own = describe(None if endpoint.address is None else endpoint.address[0])
    with endpoint.listening() as listener:
        if store is not None:
            store.set("rendezvous", json.dumps([*listener.getsockname()[:2], token.hex()]))
        return _serve(listener, own, world_size, token), token


def _endpoint_from_store(rank: int, store: PrefixStore) -> tuple[Endpoint, bytes]:
    """Return rank 0's endpoint, and a token that is as private as torchrun's store."""
    if rank == 0:
        host = getattr(store.underlying_store, "host", None) or "127.0.0.1"
        return Endpoint(address=(host, 0)), secrets.token_bytes(32)
    try:
        host, port, token = json.loads(store.get("rendezvous"))
    except RuntimeError as error:
        raise StageError(f"rank {rank}: rank 0 did not start in time: {error}") from None
    return Endpoint(address=(host, port)), bytes.fromhex(token)


def _serve(listener: socket.socket, own: PeerInfo, world_size: int, token: bytes) -> PeerTable:
    """Do rank 0's part: collect the description of every rank and send all of them to each."""
    acceptor = Acceptor([listener], token, [PURPOSE])
    connections: list[socket.socket] = []
    try:
        peers = _collect(acceptor, own, world_size, connections)
        session = os.urandom(8).hex()
        answer: object = {"session": session, "peers": [to_json(peer) for peer in peers]}
        return PeerTable(peers=peers, session=session)
    except StageError as error:
        answer = {"error": str(error)}
        raise
    finally:
        for sock in connections:
            with sock, contextlib.suppress(OSError):
                send_json(sock, answer, time.monotonic() + HANDSHAKE_S)


def _collect(
    acceptor: Acceptor, own: PeerInfo, world_size: int, connections: list[socket.socket]
) -> tuple[PeerInfo, ...]:
    """Return the description of every rank; append the connections to answer."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    found = {own.rank: own}
    while len(found) < world_size:
        try:
            _, sock = acceptor.take(deadline_s)
        except TimeoutError:
            missing = [str(rank) for rank in range(world_size) if rank not in found]
            raise StageError(
                f"rank {', '.join(missing)} did not start in time (seen from {own.name})"
            ) from None
        try:
            peer = _receive_peer(sock)
        except (OSError, StageError, SpecError):
            sock.close()
            continue
        connections.append(sock)
        if peer.rank in found or not 0 < peer.rank < world_size:
            raise StageError(
                f"{peer.name}: found rank {peer.rank} a second time or out of range, expected "
                f"each of {world_size} ranks once"
            )
        found[peer.rank] = peer
    return tuple(found[rank] for rank in range(world_size))


def _receive_peer(sock: socket.socket) -> PeerInfo:
    deadline_s = time.monotonic() + HANDSHAKE_S
    for _ in range(CLOCK_ROUNDS):
        receive(sock, 1, deadline_s)
        send_all(sock, _CLOCK.pack(time.perf_counter()), deadline_s)
    return from_json(PeerInfo, Fields(receive_json(sock, deadline_s), "rank"))


def _join(endpoint: Endpoint, describe: Describe, token: bytes) -> PeerTable:
    """Do the part of every rank but 0: send its own description, receive those of all."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    with endpoint.connect_authenticated(token, PURPOSE, deadline_s) as sock:
        offset_s, error_s = _compare_clocks(sock, deadline_s)
        own = describe(None if sock.family == socket.AF_UNIX else sock.getsockname()[0])
        try:
            send_json(sock, to_json(own), deadline_s)
            # Rank 0 may reach its own deadline first: leave it the time to report that.
            answer = receive_json(sock, deadline_s + HANDSHAKE_S)
        except OSError as error:
            raise StageError(f"{own.name}: lost rank 0 during the rendezvous: {error}") from None
    fields = Fields(answer, "rendezvous")
    if (reason := fields.optional_text("error")) is not None:
        raise StageError(reason)
    return replace(from_json(PeerTable, fields), clock_offset_s=offset_s, clock_error_s=error_s)


def _compare_clocks(sock: socket.socket, deadline_s: float) -> tuple[float, float]:
    """Return the offset of rank 0's clock from this one, and the bound of its error."""
    best = (float("inf"), 0.0)
    for _ in range(CLOCK_ROUNDS):
        start = time.perf_counter()
        send_all(sock, b"c", deadline_s)
        (remote,) = _CLOCK.unpack(receive(sock, _CLOCK.size, deadline_s))
        end = time.perf_counter()
        best = min(best, (end - start, remote - (start + end) / 2))
    return best[1], best[0] / 2


def _token(rendezvous: Rendezvous) -> bytes:
    """Return the shared secret; empty where only this host or user can connect."""
    if rendezvous.token_file is not None:
        return read_token(rendezvous.token_file)
    if rendezvous.address is not None and not is_loopback(rendezvous.address[0]):
        raise SpecError(
            f"master_addr: found {rendezvous.address[0]}, which other hosts can reach, and no "
            "token; expected --token_file FILE with the same secret on every host"
        )
    return b""


def _host_key() -> str:
    """Return a text that is equal for processes of one user with the same network and files."""
    parts = [Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()]
    parts += [str(Path(f"/proc/self/ns/{kind}").stat().st_ino) for kind in ("net", "mnt")]
    return ":".join([*parts, str(os.getuid())])
