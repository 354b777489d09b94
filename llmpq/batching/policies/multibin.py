"""Multi-bin batching: a batch has requests of similar predicted length.

Requests are sorted into k bins by the predicted length of their answers. Full batches of all bins
are served in the order in which they became full (multi-bin batching, Sec. 3.1), which follows from
the order of arrival.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from llmpq.batching.policies.static import must_flush
from llmpq.batching.policy_scheduler import SchedulerView, WaitingRequest
from llmpq.errors import LlmpqError, SpecError

DEFAULT_BINS = 4
"""Bins where neither their number nor a throughput is asked for."""


class MultiBinFormer:
    """Chooses the batches of multi-bin batching.

    Requests carry the predicted lengths of their answers.

    Args:
        batch: requests of a batch.
        boundaries: the k - 1 boundaries of k bins, ascending. A length on a boundary belongs to the
            bin above.
        max_wait_s: serve an incomplete batch when the oldest request has waited that long.
    """

    def __init__(
        self,
        *,
        batch: int,
        boundaries: Sequence[float],
        max_wait_s: float | None = None,
    ) -> None:
        if batch < 1:
            raise SpecError(f"multi-bin batching: found a batch of {batch}, expected at least 1")
        if list(boundaries) != sorted(boundaries):
            raise SpecError(
                f"multi-bin batching: found boundaries {list(boundaries)}, expected ascending ones"
            )
        self._batch = batch
        self._boundaries = tuple(boundaries)
        self.max_wait_s = max_wait_s

    def __call__(self, view: SchedulerView) -> tuple[int, ...]:
        """Return the batch that became full first, or an incomplete one that must be served."""
        bins: list[list[WaitingRequest]] = [[] for _ in range(len(self._boundaries) + 1)]
        for item in view.waiting:
            members = bins[self._bin_of(item)]
            members.append(item)
            if len(members) == self._batch:
                return _first_fitting(members, view.free_slots)
        if not must_flush(view, self.max_wait_s):
            return ()
        oldest = next(iter(view.waiting))
        return _first_fitting(bins[self._bin_of(oldest)], view.free_slots)

    def _bin_of(self, item: WaitingRequest) -> int:
        if not self._boundaries:
            return 0
        if item.predicted_tokens is None:
            raise LlmpqError(
                f"multi-bin batching: found no predicted length of request {item.request}, "
                "expected one"
            )
        return bisect_right(self._boundaries, item.predicted_tokens)


def _first_fitting(members: Sequence[WaitingRequest], free_slots: int) -> tuple[int, ...]:
    """Return the first members of a batch that the slots hold."""
    chosen = []
    for item in members:
        free_slots -= item.slots
        if free_slots < 0:
            break
        chosen.append(item.request)
    return tuple(chosen)


def quantile_boundaries(lengths: Sequence[float], bins: int) -> tuple[float, ...]:
    """Return boundaries that put the same number of the given lengths into each bin.

    Repeated lengths can make two boundaries equal; the bin between them is empty.
    """
    _check_bins(bins)
    if not lengths:
        raise SpecError("multi-bin batching: found no lengths, expected at least one")
    ordered = sorted(lengths)
    return tuple(ordered[len(ordered) * index // bins] for index in range(1, bins))


def _check_bins(bins: int) -> None:
    if bins < 1:
        raise SpecError(f"multi-bin batching: found {bins} bins, expected at least 1")
