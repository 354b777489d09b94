"""A ring of ranks that are threads of one process; frames pass the checks of the sockets."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Sequence

from helpers.clocks import PATIENCE_S

from llmpq.dist.transport.errors import peer_closed, peer_silent
from llmpq.dist.transport.frames import (
    Frame,
    FrameLimits,
    assemble,
    decode_header,
    encode_header,
    encode_tables,
)


class InProcessCommunicator:
    """One rank's part of the ring."""

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        links: Sequence[queue.SimpleQueue[tuple[bytes, Frame] | None]],
        limits: FrameLimits,
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self.names = names
        self.ranks: Sequence[int] = range(len(names))
        self._reader = links[rank]
        self._writer = links[(rank + 1) % len(links)]
        self._limits = limits
        self._timeout_s = timeout_s
        self._peeked: list[tuple[bytes, Frame] | None] = []  # at most one, taken by a wait
        self._sent = 0
        self._received = 0

    def send(self, frame: Frame) -> None:
        """Put the frame into the next rank's queue."""
        self._writer.put((encode_header(frame, self._limits, self._sent), frame))
        self._sent += 1

    def has_frame(self) -> bool:
        """Return whether something is in the queue."""
        return bool(self._peeked) or not self._reader.empty()

    def await_frame(self, longest_s: float) -> bool:
        """Wait until ``recv`` would return or raise at once; return whether it would."""
        if not self._peeked:
            with contextlib.suppress(queue.Empty):
                self._peeked.append(self._reader.get(timeout=longest_s))
        return bool(self._peeked)

    def recv(self) -> Frame:
        """Take a frame out of the queue."""
        previous = (self.rank - 1) % len(self.names)
        if not self.await_frame(self._timeout_s):
            raise peer_silent(self.names[previous], previous, self._timeout_s)
        item = self._peeked.pop()
        if item is None:
            raise peer_closed(self.names[previous], previous)
        header = decode_header(item[0], self._limits, self._received)
        self._received += 1
        return assemble(header, encode_tables(item[1]), item[1].payload, self._limits)

    def close(self) -> None:
        """End the queue of the next rank."""
        self._writer.put(None)


def in_process_ring(
    num_ranks: int, limits: FrameLimits, timeout_s: float = PATIENCE_S
) -> list[InProcessCommunicator]:
    """Return the communicators of ``num_ranks`` threads."""
    links: list[queue.SimpleQueue[tuple[bytes, Frame] | None]]
    links = [queue.SimpleQueue() for _ in range(num_ranks)]
    names = [f"stage {rank} (rank {rank})" for rank in range(num_ranks)]
    return [
        InProcessCommunicator(rank, names, links, limits, timeout_s) for rank in range(num_ranks)
    ]
