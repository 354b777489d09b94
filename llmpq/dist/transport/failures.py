"""Failures: how an error of one rank becomes the one sentence a user reads.

A rank that fails sends its error round the ring before it ends, and a rank that notices a lost peer
says so with that peer's name; so wherever the master stands, it learns the cause and not the echo.
A process leaves its error as a note in the run's private folder, where the launcher picks the one
that came first. Needs no torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from llmpq.errors import CapacityError, LlmpqError, SpecError, StageError
from llmpq.spec.fields import Fields, dump_json, read_json, write_text
from llmpq.spec.plan import Plan


class PeerLostError(StageError):
    """A peer closed its connection or gave no sign of life; the cause lies with that peer.

    Args:
        message: as for any error.
        rank: the peer.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


def peer_silent(name: str, rank: int, timeout_s: float) -> PeerLostError:
    """Build the error for a peer that hangs."""
    return PeerLostError(f"{name}: found no sign of life for {timeout_s:g} s, expected one", rank)


def peer_not_started(name: str, rank: int, timeout_s: float) -> PeerLostError:
    """Build the error for a process that never began: libraries and files took too long."""
    return PeerLostError(
        f"{name}: did not start within {timeout_s:g} s, expected its libraries to be loaded by "
        "then; the machine may be short of memory or busy",
        rank,
    )


def peer_closed(name: str, rank: int) -> PeerLostError:
    """Build the error for a peer that ended."""
    return PeerLostError(f"{name}: closed its connection before the run was over", rank)


def stage_name(plan: Plan, rank: int, host: str | None = None) -> str:
    """Return what messages call a rank: stage, rank, device and host."""
    device = plan.device_of(plan.stages[rank]).label
    where = device if host is None else f"{device} on {host}"
    return f"stage {rank} (rank {rank}, {where})"


def error_from_status(status: object, message: object) -> LlmpqError:
    """Return the error of an exit status, for one that crosses a process boundary."""
    kinds: dict[object, type[LlmpqError]] = {2: SpecError, 3: CapacityError, 4: StageError}
    return kinds.get(status, LlmpqError)(str(message))


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorNote:
    """What a failed rank leaves behind.

    Attributes:
        rank: who failed.
        message: for the user.
        exit_status: of its kind of error.
        blames: the rank that was lost, when that is all there was to it.
        time_s: when, on this host's monotonic clock.
    """

    rank: int
    message: str
    exit_status: int
    blames: int | None
    time_s: float


def write_note(folder: Path, note: ErrorNote) -> None:
    """Leave a note for the launcher."""
    write_text(_note_file(folder, note.rank), dump_json(asdict(note)))


def read_note(folder: Path, rank: int) -> ErrorNote | None:
    """Return the note of a rank, ``None`` when it left none."""
    path = _note_file(folder, rank)
    if not path.is_file():
        return None
    fields = Fields(read_json(path), str(path))
    return ErrorNote(
        rank=fields.integer("rank"),
        message=fields.text("message"),
        exit_status=fields.integer("exit_status"),
        blames=fields.optional_integer("blames"),
        time_s=fields.number("time_s"),
    )


def _note_file(folder: Path, rank: int) -> Path:
    return folder / f"error-{rank}.json"
