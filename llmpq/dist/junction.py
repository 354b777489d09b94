"""Junction: what one rank makes of its connected streams, by the run's wiring."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from llmpq.dist.communicator import Communicator
from llmpq.dist.kv_transfer import KVInlet, KVOutlet
from llmpq.dist.links import Inbox, Outbox
from llmpq.dist.messages import FrameLimits
from llmpq.dist.socket_communicator import SocketCommunicator
from llmpq.dist.two_rings import TwoRings
from llmpq.dist.wiring import Link, Wiring


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Junction:
    """A rank's ends of its links.

    Attributes:
        communicator: its ring, or on a master both rings as one.
        outlets, inlets: for keys and values.
    """

    communicator: Communicator
    outlets: tuple[KVOutlet, ...]
    inlets: tuple[KVInlet, ...]


def make_junction(
    rank: int,
    names: Sequence[str],
    limits: FrameLimits,
    wiring: Wiring,
    sockets: Mapping[Link, socket.socket],
    timeout_s: float,
) -> Junction:
    """Return a rank's junction.

    Args:
        rank: it is one end of each of ``sockets``, which are taken over.
        names: what messages call each rank of the run.
        limits: of this run's frames.
        wiring: of the run.
        sockets: this rank's end of every link it has.
        timeout_s: how long a peer may be silent.
    """
    rings = []
    for number, ranks in enumerate(wiring.rings):
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
    outlets, inlets = [], []
    for link, sock in sockets.items():
        if link.handover is None:
            continue
        name = names[link.target if link.source == rank else link.source]
        if link.source == rank:
            outbox = Outbox(sock, limits)
            outlets.append(KVOutlet(handover=link.handover, name=name, outbox=outbox))
        else:
            inbox = Inbox(sock, limits, timeout_s)
            inlets.append(KVInlet(handover=link.handover, name=name, inbox=inbox))
    return Junction(
        communicator=rings[0] if len(rings) == 1 else TwoRings(decode=rings[0], prefill=rings[1]),
        outlets=tuple(outlets),
        inlets=tuple(inlets),
    )
