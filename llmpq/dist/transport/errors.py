"""Errors that name a rank. Needs no torch."""

from __future__ import annotations

from llmpq.errors import CapacityError, LlmpqError, SpecError, StageError
from llmpq.spec.plan import Plan


class PeerLostError(StageError):
    """A peer, ``rank``, closed its connection or timed out; the cause lies with that peer."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


def peer_silent(name: str, rank: int, timeout_s: float) -> PeerLostError:
    """Return the error for a peer that hangs."""
    return PeerLostError(f"{name}: found no sign of life for {timeout_s:g} s, expected one", rank)


def peer_closed(name: str, rank: int) -> PeerLostError:
    """Return the error for a peer that ended."""
    return PeerLostError(f"{name}: closed its connection before the run was over", rank)


def stage_name(plan: Plan, rank: int, host: str | None = None) -> str:
    """Return the name of a rank in messages: stage or draft model, rank, device and host."""
    device = plan.cluster.devices[plan.rank_devices[rank]].label
    where = device if host is None else f"{device} on {host}"
    what = "draft model" if rank == plan.draft_rank else f"stage {rank}"
    return f"{what} (rank {rank}, {where})"


def error_from_status(status: object, message: object, *, is_permanent: bool = False) -> LlmpqError:
    """Return the error of an exit status that another process reported."""
    if status == StageError.exit_status:
        return StageError(str(message), is_permanent=is_permanent)
    kinds: dict[object, type[LlmpqError]] = {2: SpecError, 3: CapacityError}
    return kinds.get(status, LlmpqError)(str(message))
