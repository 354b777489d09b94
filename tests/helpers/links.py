"""The links of ranks that are threads of one process, over each transport."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

from helpers.clocks import PATIENCE_S
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch lists no exports

from llmpq.dist.transport.communicator import Links
from llmpq.dist.transport.socket_links import SocketLinks
from llmpq.dist.transport.topology import Link, Topology
from llmpq.dist.transport.torch_links import CPU, TorchLinks

TRANSPORTS = ("sockets", "torch")


def open_links(
    topology: Topology,
    world_size: int,
    transport: str = "sockets",
    gpus: Sequence[str | None] = (None,) * 16,
) -> list[Links]:
    """Return the connected links of every rank; ``gpus`` are those of torch's links."""
    if transport == "sockets":
        ends: list[dict[Link, socket.socket]] = [{} for _ in range(world_size)]
        for link in topology.links:
            ends[link.source][link], ends[link.target][link] = socket.socketpair()
        return [SocketLinks(rank, own) for rank, own in enumerate(ends)]
    store, made = HashStore(), {}

    def connect(rank: int) -> None:
        made[rank] = TorchLinks(
            rank=rank,
            topology=topology,
            store=store,
            host="127.0.0.1",
            gpus=gpus,
            device=CPU,
        )

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return [made[rank] for rank in range(world_size)]
