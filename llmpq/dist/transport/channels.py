"""RankChannels: what one rank makes of its connected sockets, by the run's topology."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from llmpq.dist.kv.transfer import KVReceiveLink, KVSendLink
from llmpq.dist.transport.communicator import Communicator
from llmpq.dist.transport.frames import Frame, FrameKind, FrameLimits
from llmpq.dist.transport.socket_communicator import (
    FrameReader,
    FrameWriter,
    SocketCommunicator,
    wait_for_any,
)
from llmpq.dist.transport.topology import Link, Topology


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankChannels:
    """A rank's connections to the others.

    Attributes:
        communicator: its ring; on the master of a split plan both rings as one.
        transport: of the link to the next rank: ``unix``, ``tcp`` or ``gloo``.
        send_links, receive_links: its ends of the links for keys and values (WAA).
        clock_offset_s, clock_error_s: as in :class:`PeerTable`.
    """

    communicator: Communicator
    transport: str
    send_links: tuple[KVSendLink, ...] = ()
    receive_links: tuple[KVReceiveLink, ...] = ()
    clock_offset_s: float = 0.0
    clock_error_s: float = 0.0


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
    rings = []
    for number, ranks in enumerate(topology.rings):
        if rank in ranks:
            ends = {link.source: sockets[link] for link in sockets if link.ring == number}
            rings.append(
                SocketCommunicator(
                    rank=rank,
                    names=names,
                    # Keys and values have links of their own: a ring refuses them.
                    limits=replace(limits, kv_token_bytes=()),
                    outgoing=ends[rank],
                    incoming=ends[ranks[ranks.index(rank) - 1]],
                    timeout_s=timeout_s,
                    ranks=ranks,
                )
            )
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
    return RankChannels(
        communicator=rings[0] if len(rings) == 1 else SplitRing(decode=rings[0], prefill=rings[1]),
        transport=transport,
        send_links=tuple(send_links),
        receive_links=tuple(receive_links),
    )


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
