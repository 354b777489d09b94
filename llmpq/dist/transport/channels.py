"""RankChannels: what one rank makes of its links, by the run's topology."""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from llmpq.batching.engine_step import FEW_TOKENS
from llmpq.batching.speculation import MAX_STEP_TOKENS
from llmpq.dist.io.job import BEATS_PER_TIMEOUT
from llmpq.dist.kv.transfer import KVReceiveLink, KVSendLink
from llmpq.dist.transport.communicator import (
    Communicator,
    FrameReader,
    FrameWriter,
    LinkClosedError,
    Links,
)
from llmpq.dist.transport.errors import peer_closed, peer_silent
from llmpq.dist.transport.frames import LAST_KINDS, Frame, FrameKind, FrameLimits
from llmpq.dist.transport.topology import DRAFT_RING, Topology
from llmpq.errors import StageError

CLOSE_TIMEOUT_S: Final = 1.0
"""How long a closing rank waits for the next one to take what was sent to it."""
PAUSE_S: Final = 0.5
"""A wait that took this much longer than asked for means that this process itself was stopped."""
_MS: Final = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankChannels:
    """A rank's connections to the others.

    Attributes:
        communicator: its ring; on the master of a split plan both rings as one, ``None`` where the
            master is the only stage.
        transport: of the link to the next rank: ``unix``, ``tcp``, ``gloo`` or ``nccl``.
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
    links: Links,
    timeout_s: float,
) -> RankChannels:
    """Return the communicator and the links of a rank.

    ``links`` are its own, which are taken over; no peer may be silent for longer than
    ``timeout_s``.
    """

    def ring(number: int, ranks: Sequence[int], own: FrameLimits) -> RingCommunicator:
        ends = {link.source: link for link in topology.links if link.ring == number}
        return RingCommunicator(
            rank=rank,
            names=names,
            writer=links.writer(ends[rank], own),
            reader=links.reader(ends[ranks[ranks.index(rank) - 1]], own, timeout_s),
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
    send_links, receive_links = [], []
    for link in topology.links:
        handover = link.handover
        if handover is not None and link.source == rank:
            writer, name = links.writer(link, limits), names[link.target]
            send_links.append(KVSendLink(handover=handover, name=name, writer=writer))
        elif handover is not None and link.target == rank:
            reader, name = links.reader(link, limits, timeout_s), names[link.source]
            receive_links.append(KVReceiveLink(handover=handover, name=name, reader=reader))
    communicator: Communicator | None = rings[0] if rings else None
    if len(rings) > 1:
        communicator = SplitRing(decode=rings[0], prefill=rings[1])
    return RankChannels(
        communicator=communicator,
        transport=links.transport,
        draft=draft,
        send_links=tuple(send_links),
        receive_links=tuple(receive_links),
    )


def _draft_limits(limits: FrameLimits) -> FrameLimits:
    """Return the limits of draft tokens: one sequence of a step may begin, with its prompt."""
    tokens = limits.max_context + MAX_STEP_TOKENS * (FEW_TOKENS + 1)
    return limits.of_token_ids(MAX_STEP_TOKENS, tokens)


class RingCommunicator:
    """One rank's part of a ring of ``ranks``, by default of all; the same over every transport.

    The calling thread writes and reads; one helper thread, asleep otherwise, writes the rest of
    large frames and the heartbeats. Silence counts only during a wait, and between calls of
    ``has_frame`` that follow each other closely, as those of an idle master do.

    Args:
        writer: sending end of the link to the next rank.
        reader: receiving end of the link from the previous rank.
        timeout_s: longest silence of a peer.
    """

    def __init__(
        self,
        *,
        rank: int,
        names: Sequence[str],
        writer: FrameWriter,
        reader: FrameReader,
        timeout_s: float,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.rank = rank
        self.names = names
        self.ranks: Sequence[int] = range(len(names)) if ranks is None else ranks
        index = self.ranks.index(rank)
        self._next = self.ranks[(index + 1) % len(self.ranks)]
        self._previous = self.ranks[index - 1]
        self._timeout_s = timeout_s
        self._reader = reader
        self._arrived: Frame | None = None
        self._failure: StageError | None = None
        self._first_look_s = self._last_look_s = -math.inf  # calls of ``has_frame`` without a gap
        self._writer = writer
        self._lock = threading.Lock()  # of the writer and the five below
        self._has_backlog = False
        self._is_lost = False
        self._is_last_sent = False
        self._is_closed = False
        self._last_sent_s = time.monotonic()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run_writer, daemon=True, name="link")
        self._thread.start()

    def send(self, frame: Frame) -> None:
        """Start sending to the next rank."""
        with self._lock:
            self._write(frame)
            self._is_last_sent |= frame.kind in LAST_KINDS
            is_lost, has_backlog = self._is_lost, self._has_backlog
        if is_lost:
            raise peer_closed(self.names[self._next], self._next)
        if has_backlog:
            os.eventfd_write(self._wake, 1)

    def has_frame(self) -> bool:
        """Return whether ``recv`` would return or raise at once."""
        if self.poll(is_waiting=False):
            return True
        now_s = time.monotonic()
        if now_s - self._last_look_s > max(self._timeout_s / BEATS_PER_TIMEOUT, 2 * PAUSE_S):
            self._first_look_s = now_s  # this process did something else, or was stopped
        self._last_look_s = now_s
        return self.remaining_s(self._first_look_s) <= 0

    def await_frame(self, longest_s: float) -> bool:
        """Wait until ``recv`` would return or raise at once; return whether it would."""
        return wait_for_any([self], longest_s) is not None

    def recv(self) -> Frame:
        """Return the next frame, waiting for it; its tensor is valid until the next call."""
        wait_for_any([self])
        if self._failure is not None:
            raise self._failure  # the next call raises it again
        frame, self._arrived = self._arrived, None
        assert frame is not None
        return frame

    def remaining_s(self, start_s: float) -> float:
        """Return how long the previous rank may stay silent in a wait that began at ``start_s``.

        Without time left, :meth:`recv` raises an error.
        """
        left_s = max(start_s, self._reader.last_received_s) + self._timeout_s - time.monotonic()
        if left_s <= 0:
            self._failure = peer_silent(self.names[self._previous], self._previous, self._timeout_s)
        return left_s

    def poll(self, *, is_waiting: bool = True) -> bool:
        """Read a frame as :meth:`FrameReader.read`; return whether ``recv`` would return."""
        if self._arrived is not None or self._failure is not None:
            return True
        try:
            frame = self._reader.read(is_waiting=is_waiting)
            while frame is not None and frame.kind is FrameKind.HEARTBEAT:
                frame = self._reader.read(is_waiting=is_waiting)
            self._arrived = frame
        except LinkClosedError:
            self._failure = peer_closed(self.names[self._previous], self._previous)
        except StageError as error:
            self._failure = error
        return self._arrived is not None or self._failure is not None

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when bytes arrive."""
        return self._reader.fileno()

    def close(self) -> None:
        """Finish sending and close both connections."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        self._writer.close(CLOSE_TIMEOUT_S)
        self._reader.close()

    def _write(self, frame: Frame | None) -> None:
        """Send a frame, or more of the backlog; the lock is held."""
        try:
            if frame is not None:
                self._writer.write(frame)
                self._last_sent_s = time.monotonic()
            self._has_backlog = not self._writer.flush()
        except LinkClosedError:
            self._is_lost = True
            self._has_backlog = False

    def _run_writer(self) -> None:
        """Send the rest of large frames, and heartbeats if nothing else is sent."""
        interval_s = self._timeout_s / BEATS_PER_TIMEOUT
        while True:
            with self._lock:
                if self._is_lost or self._is_closed:
                    return  # ``close`` sends the rest
                now_s = time.monotonic()
                # With a backlog, the peer has not read all that came before it.
                is_quiet = not (self._has_backlog or self._is_last_sent)
                is_due = is_quiet and now_s - self._last_sent_s >= interval_s
                self._write(Frame(kind=FrameKind.HEARTBEAT) if is_due else None)
                left_s = max(0.0, self._last_sent_s + interval_s - now_s) if is_quiet else None
                has_backlog = self._has_backlog
            self._writer.wait(left_s, self._wake, for_room=has_backlog)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)


class SplitRing:
    """The master's communicator where prefill and decode have stages of their own (WAA).

    Every other stage is on one of two rings, the master on both. A micro-batch goes to the ring of
    its phase, every other frame to both. Frames of the decode ring are received first, so that no
    answer waits for a prefill.
    """

    def __init__(self, *, prefill: RingCommunicator, decode: RingCommunicator) -> None:
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


def wait_for_any(
    rings: Sequence[RingCommunicator], longest_s: float = math.inf
) -> RingCommunicator | None:
    """Return the first ring whose ``recv`` would return at once; ``None`` after ``longest_s``."""
    start_s = time.monotonic()
    end_s = start_s + longest_s
    poll: select.poll | None = None
    while True:
        for ring in rings:
            if ring.poll():
                return ring
        asked_s = time.monotonic()
        left_s = min(ring.remaining_s(start_s) for ring in rings)
        if left_s <= 0:
            continue  # a ring now has the error of a silent peer
        if asked_s >= end_s:
            return None
        left_s = min(left_s, end_s - asked_s)
        if poll is None:
            poll = select.poll()
            for ring in rings:
                poll.register(ring.fileno(), select.POLLIN)
        poll.poll(left_s * _MS)
        if time.monotonic() - asked_s > left_s + PAUSE_S:
            start_s = time.monotonic()  # this process was stopped, not the peer
