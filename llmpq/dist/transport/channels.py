"""RankChannels: what one rank makes of its connected sockets, by the run's topology."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from llmpq.batching.drafts import FEW_TOKENS
from llmpq.batching.speculation import MAX_STEP_TOKENS
from llmpq.dist.kv.transfer import KVReceiveLink, KVSendLink
from llmpq.dist.transport.communicator import Communicator
from llmpq.dist.transport.frames import Frame, FrameKind, FrameLimits
from llmpq.dist.transport.socket_communicator import (
    FrameReader,
    FrameWriter,
    SocketCommunicator,
    wait_for_any,
)
from llmpq.dist.transport.topology import DRAFT_RING, Link, Topology


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankChannels:
    """A rank's connections to the others.

    Attributes:
        communicator: its ring; on the master of a split plan both rings as one, ``None`` where the
            master is the only stage.
        transport: of the link to the next rank: ``unix``, ``tcp`` or ``gloo``.
        draft: on the master, the ring with the rank of the draft model, ``None`` without one.
        send_links, receive_links: its ends of the links for keys and values (WAA).
        clock_offset_s, clock_error_s: as in :class:`PeerTable`.
    """

    communicator: Communicator | None
    transport: str
    draft: Communicator | None = None
    send_links: tuple[KVSendLink, ...] = ()
    receive_links: tuple[KVReceiveLink, ...] = ()
    clock_offset_s: float = 0.0
    clock_error_s: float = 0.0

    def close(self) -> None:
        """Close the rings."""
        for ring in (self.communicator, self.draft):
            if ring is not None:
                ring.close()


def make_rank_channels(
    rank: int,
    names: Sequence[str],
    limits: FrameLimits,
    topology: Topology,
    sockets: Mapping[Link, socket.socket],
    timeout_s: float,
) -> RankChannels:
    """Return the communicator and the links of a rank.

    ``sockets`` are its ends of its links and are taken over; no peer may be silent for longer than
    ``timeout_s``.
    """

    def ring(number: int, ranks: Sequence[int], own: FrameLimits) -> SocketCommunicator:
        ends = {link.source: sockets[link] for link in sockets if link.ring == number}
        return SocketCommunicator(
            rank=rank,
            names=names,
            limits=own,
            outgoing=ends[rank],
            incoming=ends[ranks[ranks.index(rank) - 1]],
            timeout_s=timeout_s,
            ranks=ranks,
        )

    # Keys and values have links of their own: a ring refuses them.
    own = replace(limits, kv_token_bytes=())
    rings = [
        ring(number, ranks, own) for number, ranks in enumerate(topology.rings) if rank in ranks
    ]
    draft = None
    if topology.draft_rank is not None and rank in (0, topology.draft_rank):
        draft = ring(DRAFT_RING, (0, topology.draft_rank), _draft_limits(limits))
        if rank:
            rings, draft = [draft], None
    send_links, receive_links, transport = [], [], "unix"
    for link, sock in sockets.items():
        handover, is_source = link.handover, link.source == rank
        if handover is None:
            if is_source and sock.family != socket.AF_UNIX:
                transport = "tcp"
        elif is_source:
            writer = FrameWriter(sock, limits)
            send_links.append(KVSendLink(handover=handover, name=names[link.target], writer=writer))
        else:
            reader, name = FrameReader(sock, limits, timeout_s), names[link.source]
            receive_links.append(KVReceiveLink(handover=handover, name=name, reader=reader))
    communicator: Communicator | None = rings[0] if rings else None
    if len(rings) > 1:
        communicator = SplitRing(decode=rings[0], prefill=rings[1])
    return RankChannels(
        communicator=communicator,
        transport=transport,
        draft=draft,
        send_links=tuple(send_links),
        receive_links=tuple(receive_links),
    )


def _draft_limits(limits: FrameLimits) -> FrameLimits:
    """Return the limits of draft tokens: one sequence of a step may begin, with its prompt."""
    tokens = limits.max_context + MAX_STEP_TOKENS * (FEW_TOKENS + 1)
    return limits.of_token_ids(MAX_STEP_TOKENS, tokens)


class SplitRing:
    """The master's communicator where prefill and decode have stages of their own (WAA).

    Every other stage is on one of two rings, the master on both. A micro-batch goes to the ring of
    its phase, every other frame to both. Frames of the decode ring are received first, so that no
    answer waits for a prefill.
    """

    def __init__(self, *, prefill: SocketCommunicator, decode: SocketCommunicator) -> None:
        self.rank = decode.rank
        self.names = decode.names
        self.ranks: Sequence[int] = (*decode.ranks, *prefill.ranks[1:])
        self._rings = {FrameKind.DECODE: decode, FrameKind.PREFILL: prefill}
        self._running = [decode, prefill]  # rings that have not shut down

    def send(self, frame: Frame) -> None:
        """Send a micro-batch to the ring of its phase, and every other frame to both rings."""
        if frame.kind in self._rings:
            self._rings[frame.kind].send(frame)
            return
        failure: Exception | None = None
        for ring in self._rings.values():
            try:
                ring.send(frame)
            except Exception as error:  # the other ring must receive it all the same
                failure = failure or error
        if failure is not None:
            raise failure

    def has_frame(self) -> bool:
        """Return whether ``recv`` would return or raise at once."""
        return any(ring.has_frame() for ring in self._running)

    def await_frame(self, longest_s: float) -> bool:
        """Wait until ``recv`` would return or raise at once; return whether it would."""
        return wait_for_any(self._running, longest_s) is not None

    def recv(self) -> Frame:
        """Return the next frame of either ring; a shutdown once both rings have shut down."""
        while True:
            ring = wait_for_any(self._running)
            assert ring is not None  # the wait had no limit
            frame = ring.recv()
            if frame.kind is FrameKind.SHUTDOWN and len(self._running) > 1:
                self._running.remove(ring)  # its stages may close their connections from now on
                continue
            return frame

    def close(self) -> None:
        """Close both rings."""
        for ring in self._rings.values():
            ring.close()
