"""SplitRing: the master's place where prefill and decode have stages of their own (WAA).

Every stage is on one ring, as ever; the master is on both. What it sends goes the way of its kind,
and news goes both ways; what comes back is taken in as it comes, decode first, so that no answer
waits for a prefill.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmpq.dist.transport.frames import Frame, FrameKind
from llmpq.dist.transport.socket_communicator import SocketCommunicator, wait_for_any


class SplitRing:
    """Two rings that look like one to whoever sends each micro-batch off and awaits it.

    Args:
        prefill: ring of the stages that prefill.
        decode: ring of the stages that decode.
    """

    def __init__(self, *, prefill: SocketCommunicator, decode: SocketCommunicator) -> None:
        self.rank = decode.rank
        self.names = decode.names
        self.ranks: Sequence[int] = (*decode.ranks, *prefill.ranks[1:])
        self._ways = {FrameKind.PREFILL: prefill, FrameKind.DECODE: decode}
        self._open = [decode, prefill]  # those that have not ended, the one to hear first before

    def send(self, frame: Frame) -> None:
        """Send a micro-batch its way, and everything else to all stages."""
        if frame.kind in self._ways:
            self._ways[frame.kind].send(frame)
            return
        failure: Exception | None = None
        for ring in self._ways.values():
            try:
                ring.send(frame)
            except Exception as error:  # the other ring must hear it all the same
                failure = failure or error
        if failure is not None:
            raise failure

    def has_frame(self) -> bool:
        """Tell whether ``recv`` would return or raise at once."""
        return any(ring.has_frame() for ring in self._open)

    def await_frame(self, longest_s: float) -> bool:
        """Wait for so long until ``recv`` would return or raise at once."""
        return wait_for_any(self._open, longest_s) is not None

    def recv(self) -> Frame:
        """Return the next frame of either ring; their shutdowns are one, when both have ended."""
        while True:
            ring = wait_for_any(self._open)
            assert ring is not None  # it was waited for as long as it took
            frame = ring.recv()
            if frame.kind is FrameKind.SHUTDOWN and len(self._open) > 1:
                self._open.remove(ring)  # its stages hang up now, and may
                continue
            return frame

    def close(self) -> None:
        """Let go of both."""
        for ring in self._ways.values():
            ring.close()
