"""SocketCommunicator: the ring over stream sockets, unix inside a host and TCP between hosts.

Sends never wait: what the kernel does not take at once is sent on by one helper thread, which
otherwise sleeps and says, several times within every timeout, that this rank is alive. Receiving
has no thread: whoever waits for a frame reads it, so nobody must be woken first, and silence is
counted only while somebody waits. A peer that died closed its sockets: the kernel says so at once.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import threading
import time
from collections.abc import Sequence

from llmpq.dist.io.job import BEATS_PER_TIMEOUT
from llmpq.dist.transport.failures import peer_closed, peer_silent
from llmpq.dist.transport.frames import Frame, FrameKind, FrameLimits
from llmpq.dist.transport.links import FrameReader, FrameWriter, LinkClosedError
from llmpq.errors import StageError

FAREWELL_S = 1.0
"""How long a closing rank waits for the next one to take what was sent to it."""
PAUSE_S = 0.5
"""A wait that took this much longer than asked for means that this process itself was stopped."""
_MS = 1000.0
_LAST_KINDS = (FrameKind.SHUTDOWN, FrameKind.ERROR)


class SocketCommunicator:
    """One process's place in the ring.

    Args:
        rank: of this process.
        names: what messages call each rank of the run.
        limits: of this run's frames.
        ranks: of this ring, in the order of sending; every rank by default.
        outgoing: stream to the next rank; taken over.
        incoming: stream from the rank before; taken over.
        timeout_s: how long a peer may be silent.
    """

    def __init__(  # noqa: PLR0913  two streams, and who is who
        self,
        *,
        rank: int,
        names: Sequence[str],
        limits: FrameLimits,
        outgoing: socket.socket,
        incoming: socket.socket,
        timeout_s: float,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.rank = rank
        self.names = names
        self.ranks: Sequence[int] = range(len(names)) if ranks is None else ranks
        place = self.ranks.index(rank)
        self.next_rank = self.ranks[(place + 1) % len(self.ranks)]
        self._previous = self.ranks[place - 1]
        self._timeout_s = timeout_s
        self._reader = FrameReader(incoming, limits, timeout_s, is_shared=True)
        self._arrived: Frame | None = None
        self._failure: StageError | None = None
        self._writer = FrameWriter(outgoing, limits, is_shared=True)
        self._lock = threading.Lock()  # of the outbox and the five below
        self._has_rest = False
        self._is_lost = False
        self._is_last_sent = False
        self._is_closed = False
        self._last_s = time.monotonic()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._tend, daemon=True, name="link")
        self._thread.start()

    def send(self, frame: Frame) -> None:
        """Start sending to the next rank."""
        with self._lock:
            self._put(frame)
            self._is_last_sent |= frame.kind in _LAST_KINDS
            is_lost, has_rest = self._is_lost, self._has_rest
        if is_lost:
            raise peer_closed(self.names[self.next_rank], self.next_rank)
        if has_rest:
            os.eventfd_write(self._wake, 1)

    def has_frame(self) -> bool:
        """Tell whether ``recv`` would return or raise at once."""
        return self._look()

    def await_frame(self, longest_s: float) -> bool:
        """Wait for so long until ``recv`` would return or raise at once."""
        return wait_for_any([self], longest_s) is not None

    def recv(self) -> Frame:
        """Return the next frame, waiting for it; its tensor is valid until the next call."""
        wait_for_any([self])
        if self._failure is not None:
            raise self._failure  # whoever asks again hears the same
        frame, self._arrived = self._arrived, None
        assert frame is not None
        return frame

    def patience_s(self, start_s: float) -> float:
        """Return how long the peer may go on saying nothing to who has waited since then.

        With nothing left it is named as silent, and :meth:`recv` says so.
        """
        left_s = max(start_s, self._reader.heard_s) + self._timeout_s - time.monotonic()
        if left_s <= 0:
            self._failure = peer_silent(self.names[self._previous], self._previous, self._timeout_s)
        return left_s

    def look(self) -> bool:
        """Take in what is here, with all of a payload of which there is a part."""
        return self._look(is_waiting=True)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when something comes."""
        return self._reader.fileno()

    def close(self) -> None:
        """Finish what is being sent and let go."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        self._writer.close(FAREWELL_S)
        self._reader.close()

    def _look(self, *, is_waiting: bool = False) -> bool:
        """Take in what is here, heartbeats apart; tell whether there is something to say."""
        if self._arrived is not None or self._failure is not None:
            return True
        try:
            frame = self._reader.take(is_waiting=is_waiting)
            while frame is not None and frame.kind is FrameKind.HEARTBEAT:
                frame = self._reader.take(is_waiting=is_waiting)
            self._arrived = frame
        except LinkClosedError:
            self._failure = peer_closed(self.names[self._previous], self._previous)
        except StageError as error:
            self._failure = error
        return self._arrived is not None or self._failure is not None

    def _put(self, frame: Frame | None) -> None:
        """Send a frame, or more of the rest; the lock is held."""
        try:
            if frame is not None:
                self._writer.put(frame)
                self._last_s = time.monotonic()
            self._has_rest = not self._writer.flush()
        except LinkClosedError:
            self._is_lost = True
            self._has_rest = False

    def _tend(self) -> None:
        """Send the rest of large frames, and heartbeats when nothing else is sent."""
        pause_s = self._timeout_s / BEATS_PER_TIMEOUT
        while True:
            with self._lock:
                if self._is_lost or self._is_closed:
                    return  # ``close`` sends what is left
                now_s = time.monotonic()
                # While there is a rest, the peer has not even read all that came before it.
                is_quiet = not (self._has_rest or self._is_last_sent)
                is_due = is_quiet and now_s - self._last_s >= pause_s
                self._put(Frame(kind=FrameKind.HEARTBEAT) if is_due else None)
                left_s = max(0.0, self._last_s + pause_s - now_s) if is_quiet else None
                has_rest = self._has_rest
            self._writer.wait(left_s, self._wake, for_room=has_rest)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)


def wait_for_any(
    rings: Sequence[SocketCommunicator], longest_s: float = math.inf
) -> SocketCommunicator | None:
    """Return the first ring, in the order given, that has a frame or an error to say.

    ``None`` when there was none for ``longest_s``.
    """
    start_s = time.monotonic()
    end_s = start_s + longest_s
    poll: select.poll | None = None
    while True:
        for ring in rings:
            if ring.look():
                return ring
        asked_s = time.monotonic()
        left_s = min(ring.patience_s(start_s) for ring in rings)
        if left_s <= 0:
            continue  # one of them now says who is silent
        if asked_s >= end_s:
            return None
        left_s = min(left_s, end_s - asked_s)
        if poll is None:
            poll = select.poll()
            for ring in rings:
                poll.register(ring.fileno(), select.POLLIN)
        poll.poll(left_s * _MS)
        if time.monotonic() - asked_s > left_s + PAUSE_S:
            start_s = time.monotonic()  # a pause of our own is not the peer's silence
