"""Failures: how an error of one rank becomes the one sentence a user reads.

A rank that fails sends its error round the ring before it ends, and a rank that notices a lost peer
says so with that peer's name; so wherever the master stands, it learns the cause and not the echo.
"""

from __future__ import annotations

import json

import torch

from llmpq.dist.messages import Frame, FrameKind
from llmpq.errors import CapacityError, LlmpqError, SpecError, StageError

MAX_MESSAGE_LENGTH = 2000


class PeerLostError(StageError):
    """A peer closed its connection or gave no sign of life; the cause lies with that peer.

    Args:
        message: as for any error.
        rank: the peer.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


def silent_peer(name: str, rank: int, timeout_s: float) -> PeerLostError:
    """Build the error for a peer that hangs."""
    return PeerLostError(f"{name}: found no sign of life for {timeout_s:g} s, expected one", rank)


def closed_peer(name: str, rank: int) -> PeerLostError:
    """Build the error for a peer that ended."""
    return PeerLostError(f"{name}: closed its connection before the run was over", rank)


def error_frame(error: LlmpqError) -> Frame:
    """Return the frame that tells the ranks further on why this one ends."""
    text = json.dumps(
        {"exit_status": error.exit_status, "message": str(error)[:MAX_MESSAGE_LENGTH]}
    )
    return Frame(kind=FrameKind.ERROR, text=text.encode())


def error_of(frame: Frame) -> LlmpqError:
    """Return the error that an error frame tells of."""
    try:
        found = json.loads(frame.text)
        status, message = found["exit_status"], found["message"]
    except (ValueError, TypeError, KeyError):
        return StageError("a stage failed and sent no readable reason")
    return error_of_status(status, message)


def error_of_status(status: object, message: object) -> LlmpqError:
    """Return the error of an exit status, for one that crosses a process boundary."""
    kinds: dict[object, type[LlmpqError]] = {2: SpecError, 3: CapacityError, 4: StageError}
    return kinds.get(status, LlmpqError)(str(message))


def described(error: Exception, name: str) -> LlmpqError:
    """Turn anything that went wrong inside a stage into one of our errors, naming the stage."""
    if isinstance(error, SpecError | CapacityError):
        return error
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return CapacityError(f"{name}: out of memory: {str(error).splitlines()[0:1]}")
    text = f"{type(error).__name__}: {error}" if not isinstance(error, LlmpqError) else str(error)
    return StageError(text if text.startswith("stage ") else f"{name}: {text}")
