"""Communicator: frames from rank to rank; the one door through which stages speak.

Every rank sends to the next one and hears the one before it, around a ring (the last stage answers
to the master). A transport promises: frames of a link arrive complete, checked and in order;
``send`` does not wait for the peer to be idle; and no call outlasts a peer that died or hangs.
``llmpq.dist.transport.connect`` makes those that cross processes and hosts; the one here joins
threads of one process.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Sequence
from typing import Protocol

from llmpq.dist.transport.failures import peer_closed, peer_silent
from llmpq.dist.transport.frames import Frame, FrameLimits, assemble, decode_header, encode_header


class Communicator(Protocol):
    """One rank's view of the ring.

    Attributes:
        rank: of this process or thread.
        names: what to call each rank of the run in a message.
        ranks: those of this ring, in the order of sending, the master first.
    """

    rank: int
    names: Sequence[str]
    ranks: Sequence[int]

    def send(self, frame: Frame) -> None:
        """Start sending to the next rank; the frame's tensor must not change any more.

        Raises:
            StageError: the peer is gone.
        """
        ...

    def has_frame(self) -> bool:
        """Tell whether ``recv`` would return or raise at once."""
        ...

    def await_frame(self, longest_s: float) -> bool:
        """Wait until ``recv`` would return or raise at once, for so long; tell whether it would."""
        ...

    def recv(self) -> Frame:
        """Return the next frame of the rank before, waiting for it.

        Its tensor may be a view of the buffer that the next frame lands in: it is valid until the
        next call of any of these three.

        Raises:
            StageError: the peer is gone, hangs, or sent something that is not a frame.
        """
        ...

    def close(self) -> None:
        """Finish what is being sent and let go; the peers see a closed connection."""
        ...


class InProcessCommunicator:
    """Ranks as threads of one process, joined by queues. Frames pass the same checks."""

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
        self._held: list[tuple[bytes, Frame] | None] = []  # at most one, taken out by a wait
        self._sent = 0
        self._received = 0

    def send(self, frame: Frame) -> None:
        """Put the frame into the next rank's queue."""
        self._writer.put((encode_header(frame, self._limits, self._sent), frame))
        self._sent += 1

    def has_frame(self) -> bool:
        """Tell whether something is in the queue."""
        return bool(self._held) or not self._reader.empty()

    def await_frame(self, longest_s: float) -> bool:
        """Wait for so long until ``recv`` would return or raise at once."""
        if not self._held:
            with contextlib.suppress(queue.Empty):
                self._held.append(self._reader.get(timeout=longest_s))
        return bool(self._held)

    def recv(self) -> Frame:
        """Take a frame out of the queue."""
        previous = (self.rank - 1) % len(self.names)
        if not self.await_frame(self._timeout_s):
            raise peer_silent(self.names[previous], previous, self._timeout_s)
        item = self._held.pop()
        if item is None:
            raise peer_closed(self.names[previous], previous)
        header = decode_header(item[0], self._limits, self._received)
        self._received += 1
        return assemble(header, item[1].payload, self._limits)

    def close(self) -> None:
        """Tell the next rank that nothing follows."""
        self._writer.put(None)


def in_process_ring(
    num_ranks: int, limits: FrameLimits, timeout_s: float = 10.0
) -> list[InProcessCommunicator]:
    """Return the communicators of ``num_ranks`` threads."""
    links: list[queue.SimpleQueue[tuple[bytes, Frame] | None]]
    links = [queue.SimpleQueue() for _ in range(num_ranks)]
    names = [f"stage {rank} (rank {rank})" for rank in range(num_ranks)]
    return [
        InProcessCommunicator(rank, names, links, limits, timeout_s) for rank in range(num_ranks)
    ]
