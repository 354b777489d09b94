"""Communicator: how a rank exchanges frames with the others, and the control messages.

Every rank sends to the next one of a ring and receives from the previous one; the last stage
answers to the master. An implementation guarantees that the frames of a link arrive complete,
checked and in order, that ``send`` does not wait for the peer to be idle, and that no call outlasts
a peer that died or hangs. ``transport.rendezvous`` connects the ranks, ``StageWorker`` answers the
control messages: ready, shutdown with statistics, and errors.

Below the rings are links, each from one rank to any other. :class:`Links` is what a transport
implements: ``socket_links`` over sockets and shared memory, ``torch_links`` over torch.distributed.
Everything above, such as heartbeats and time limits, is the same for both (``channels``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Protocol

import torch

from llmpq.dist.metrics.measurement import StageStats
from llmpq.dist.transport.errors import error_from_status
from llmpq.dist.transport.frames import Frame, FrameKind, FrameLimits
from llmpq.dist.transport.topology import Link
from llmpq.errors import CapacityError, LlmpqError, SpecError, StageError
from llmpq.spec.fields import Fields, from_json

MAX_MESSAGE_LENGTH = 2000


class Communicator(Protocol):
    """One rank's view of a ring.

    Attributes:
        rank: of this process or thread.
        names: of all ranks of the run, in messages.
        ranks: of this ring, in the order of sending, the master first.
    """

    rank: int
    names: Sequence[str]
    ranks: Sequence[int]

    def send(self, frame: Frame) -> None:
        """Start sending to the next rank; the frame's tensor must not change any more."""
        ...

    def has_frame(self) -> bool:
        """Return whether ``recv`` would return or raise at once."""
        ...

    def await_frame(self, longest_s: float) -> bool:
        """Wait until ``recv`` would return or raise at once; return whether it would."""
        ...

    def recv(self) -> Frame:
        """Return the next frame of the previous rank, waiting for it.

        Its tensor may be a view of a buffer that the next frame is received into: it is valid until
        the next call of any of these three.

        Raises:
            StageError: the peer is gone, hangs, or sent something that is not a frame.
        """
        ...

    def close(self) -> None:
        """Finish sending and close the connections."""
        ...


class LinkClosedError(Exception):
    """The other end of a link is gone; the caller, which knows its name, reports it."""


class FrameWriter(Protocol):
    """The sending end of a link.

    Only ``drain`` and ``close`` wait for the peer. All methods but ``close`` raise
    ``LinkClosedError`` once the peer is gone.
    """

    def write(self, frame: Frame) -> None:
        """Start sending a frame, whose tensor must not change any more."""
        ...

    def flush(self) -> bool:
        """Send what can be sent at once; return whether no more calls are needed."""
        ...

    def wait(self, timeout_s: float | None, wake: int, *, for_room: bool) -> None:
        """Wait until the descriptor ``wake`` is readable or, if asked, ``flush`` can send more."""
        ...

    def drain(self, timeout_s: float, limit_s: float = math.inf) -> bool:
        """Send all that is left; return whether the peer took it.

        ``timeout_s`` is the longest time in which it takes nothing, ``limit_s`` that for all of it.
        """
        ...

    def close(self, timeout_s: float) -> None:
        """Give the peer ``timeout_s`` seconds to take the rest, and close the link."""
        ...


class FrameReader(Protocol):
    """The receiving end of a link. A frame's tensor is valid until the next frame is read."""

    @property
    def last_received_s(self) -> float:
        """When bytes last arrived, on the monotonic clock."""
        ...

    def read(self, *, is_waiting: bool = False) -> Frame | None:
        """Return the next frame if all of it is here, else ``None``.

        ``is_waiting`` may wait for a payload whose header is here.

        Raises:
            LinkClosedError: the peer is gone.
            StageError: the bytes are not a frame of this run; the link cannot be used any more.
        """
        ...

    def fileno(self) -> int:
        """Return the descriptor that is readable when ``read`` may find more."""
        ...

    def close(self) -> None:
        """Close the link."""
        ...


class Links(Protocol):
    """The open links of one rank, as a transport made them."""

    @property
    def transport(self) -> str:
        """Of the ring link to the next rank: ``unix``, ``tcp``, ``gloo`` or ``nccl``."""
        ...

    def writer(self, link: Link, limits: FrameLimits) -> FrameWriter:
        """Return the sending end of a link, of which this rank is the source."""
        ...

    def reader(self, link: Link, limits: FrameLimits, timeout_s: float) -> FrameReader:
        """Return the receiving end of a link, of which this rank is the target.

        ``timeout_s`` limits the wait for the rest of a frame that has begun.
        """
        ...


def wait_until_ready(communicator: Communicator) -> None:
    """Wait until every other rank has loaded its layers; raise the error of one that failed."""
    for _ in communicator.ranks[1:]:
        _expect(communicator, FrameKind.READY)


def shut_down(communicator: Communicator) -> list[StageStats]:
    """End the run; return the statistics of every other rank, in order of rank."""
    communicator.send(Frame(kind=FrameKind.SHUTDOWN))
    found = [_stats(_expect(communicator, FrameKind.STATS)) for _ in communicator.ranks[1:]]
    _expect(communicator, FrameKind.SHUTDOWN)
    found.sort(key=lambda stats: stats.rank)  # of two rings they arrive in any order
    ranks = [stats.rank for stats in found]
    if ranks != sorted(communicator.ranks[1:]):
        raise StageError(f"found statistics of ranks {ranks}, expected those of every other rank")
    return found


def error_frame(error: LlmpqError) -> Frame:
    """Return the frame that reports why a rank ends."""
    fields = {
        "exit_status": error.exit_status,
        "message": str(error)[:MAX_MESSAGE_LENGTH],
        "is_permanent": error.is_permanent,
    }
    return Frame(kind=FrameKind.ERROR, text=json.dumps(fields).encode())


def error_from_frame(frame: Frame) -> LlmpqError:
    """Return the error of an error frame."""
    try:
        found = json.loads(frame.text)
        status, message, permanent = (
            found[name] for name in ("exit_status", "message", "is_permanent")
        )
    except (ValueError, TypeError, KeyError):
        return StageError("a stage failed and sent no readable reason")
    return error_from_status(status, message, is_permanent=permanent is True)


def _expect(communicator: Communicator, kind: FrameKind) -> Frame:
    frame = communicator.recv()
    if frame.kind is FrameKind.ERROR:
        raise error_from_frame(frame)
    if frame.kind is not kind:
        name = communicator.names[communicator.ranks[-1]]
        raise StageError(f"{name}: found a frame {frame.kind.name}, expected {kind.name}")
    return frame


def _stats(frame: Frame) -> StageStats:
    try:
        return from_json(StageStats, Fields(json.loads(frame.text), "statistics"))
    except (SpecError, ValueError) as error:
        raise StageError(f"unreadable statistics of a stage: {error}") from None


def as_llmpq_error(error: Exception, name: str) -> LlmpqError:
    """Return any exception of a rank as an ``LlmpqError`` that names the stage."""
    if isinstance(error, StageError) and not str(error).startswith(("stage ", "draft model ")):
        return StageError(f"{name}: {error}", is_permanent=error.is_permanent)
    if isinstance(error, LlmpqError):
        return error
    is_allocator = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    if is_allocator or isinstance(error, MemoryError | torch.OutOfMemoryError):
        first_line = str(error).partition("\n")[0]
        return CapacityError(f"{name}: out of memory: {first_line}")
    return StageError(f"{name}: {type(error).__name__}: {error}")
