"""The two rounds a frame makes besides micro-batches: everyone is ready, everyone is done.

Both are the master's view of the ring; the workers' side is ``StageWorker``.
"""

from __future__ import annotations

import json

from llmpq.dist.communicator import Communicator
from llmpq.dist.failures import error_of
from llmpq.dist.measurement import StageStats, stats_from_fields
from llmpq.dist.messages import Frame, FrameKind
from llmpq.errors import SpecError, StageError
from llmpq.spec.fields import Fields


def wait_until_ready(communicator: Communicator) -> None:
    """Wait until every other rank has loaded its layers.

    Raises:
        LlmpqError: what kept a stage from it.
    """
    for _ in communicator.names[1:]:
        _expect(communicator, FrameKind.READY)


def shut_down(communicator: Communicator) -> list[StageStats]:
    """End the run and return what every other rank measured of itself, in order of rank.

    Raises:
        StageError: a stage failed, or sent something else.
    """
    communicator.send(Frame(kind=FrameKind.SHUTDOWN))
    frames = [_expect(communicator, FrameKind.STATS) for _ in communicator.names[1:]]
    _expect(communicator, FrameKind.SHUTDOWN)
    return [_stats(frame, rank) for rank, frame in enumerate(frames, start=1)]


def _expect(communicator: Communicator, kind: FrameKind) -> Frame:
    frame = communicator.recv()
    if frame.kind is FrameKind.ERROR:
        raise error_of(frame)
    if frame.kind is not kind:
        raise StageError(
            f"{communicator.names[-1]}: found a frame {frame.kind.name}, expected {kind.name}"
        )
    return frame


def _stats(frame: Frame, rank: int) -> StageStats:
    try:
        stats = stats_from_fields(Fields(json.loads(frame.text), f"statistics of rank {rank}"))
    except (SpecError, ValueError) as error:
        raise StageError(f"stage {rank}: unreadable statistics: {error}") from None
    if stats.rank != rank:
        raise StageError(f"found statistics of rank {stats.rank}, expected rank {rank}")
    return stats
