"""Junction: what one rank makes of its connected streams, by the run's wiring."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from llmpq.dist.kv.transfer import KVReceiveLink, KVSendLink
from llmpq.dist.transport.communicator import Communicator
from llmpq.dist.transport.frames import FrameLimits
from llmpq.dist.transport.links import FrameReader, FrameWriter
from llmpq.dist.transport.socket_communicator import SocketCommunicator
from llmpq.dist.transport.split_ring import SplitRing
from llmpq.dist.transport.topology import Link, Topology


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankChannels:
    """A rank's ends of its links.

    Attributes:
        communicator: its ring, or on a master both rings as one.
        send_links, receive_links: for keys and values.
    """

    communicator: Communicator
    send_links: tuple[KVSendLink, ...]
    receive_links: tuple[KVReceiveLink, ...]


def make_rank_channels(
    rank: int,
    names: Sequence[str],
    limits: FrameLimits,
    topology: Topology,
    sockets: Mapping[Link, socket.socket],
    timeout_s: float,
) -> RankChannels:
    """Return a rank's junction.

    Args:
        rank: it is one end of each of ``sockets``, which are taken over.
        names: what messages call each rank of the run.
        limits: of this run's frames.
        topology: of the run.
        sockets: this rank's end of every link it has.
        timeout_s: how long a peer may be silent.
    """
    rings = []
    for number, ranks in enumerate(topology.rings):
        if rank in ranks:
            ends = {link.source: sockets[link] for link in sockets if link.ring == number}
            rings.append(
                SocketCommunicator(
                    rank=rank,
                    names=names,
                    # Keys and values have links of their own: on a ring they are refused.
                    limits=replace(limits, kv_token_bytes=()),
                    outgoing=ends[rank],
                    incoming=ends[ranks[ranks.index(rank) - 1]],
                    timeout_s=timeout_s,
                    ranks=ranks,
                )
            )
    send_links, receive_links = [], []
    for link, sock in sockets.items():
        if link.handover is None:
            continue
        name = names[link.target if link.source == rank else link.source]
        if link.source == rank:
            writer = FrameWriter(sock, limits)
            send_links.append(KVSendLink(handover=link.handover, name=name, writer=writer))
        else:
            reader = FrameReader(sock, limits, timeout_s)
            receive_links.append(KVReceiveLink(handover=link.handover, name=name, reader=reader))
    return RankChannels(
        communicator=rings[0] if len(rings) == 1 else SplitRing(decode=rings[0], prefill=rings[1]),
        send_links=tuple(send_links),
        receive_links=tuple(receive_links),
    )
