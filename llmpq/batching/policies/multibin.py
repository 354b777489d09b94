"""Multi-bin batching: a batch is made of requests with about the same predicted length.

Requests are sorted into k bins by the predicted length of their answers. A bin that holds a full
batch hands it to one central queue, first formed, first served (multi-bin batching, Sec. 3.1).
The queue is not stored anywhere: which batch was formed first follows from the order of arrival.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from llmpq.batching.base import SchedulerView, WaitingRequest
from llmpq.batching.length import LengthPredictor
from llmpq.batching.policies.static import must_flush
from llmpq.errors import SpecError


class MultiBinFormer:
    """Chooses the batches of multi-bin batching.

    Args:
        batch: requests of a batch.
        boundaries: the k - 1 lengths between k bins, rising; none is one bin, which is standard
            batching. A length on a boundary belongs to the bin above.
        predictor: predicts the length of an answer.
        max_wait_s: serve an incomplete batch when the oldest waiting request has waited that long.
    """

    def __init__(
        self,
        *,
        batch: int,
        boundaries: Sequence[float],
        predictor: LengthPredictor,
        max_wait_s: float | None = None,
    ) -> None:
        if batch < 1:
            raise SpecError(f"multi-bin batching: found a batch of {batch}, expected at least 1")
        if list(boundaries) != sorted(boundaries):
            raise SpecError(
                f"multi-bin batching: found boundaries {list(boundaries)}, expected rising ones"
            )
        self._batch = batch
        self._boundaries = tuple(boundaries)
        self._predictor = predictor
        self.max_wait_s = max_wait_s
        self._bins: dict[int, int] = {}  # request -> bin; a prediction is made once

    def __call__(self, view: SchedulerView) -> tuple[int, ...]:
        """Return the batch that was full first, or what must go before it is full."""
        bins: list[list[int]] = [[] for _ in range(len(self._boundaries) + 1)]
        for item in view.waiting:
            members = bins[self._bin_of(item)]
            members.append(item.request)
            if len(members) == self._batch:
                return self._leave(members)
        if not must_flush(view, self.max_wait_s):
            return ()
        oldest = next(iter(view.waiting))
        return self._leave(bins[self._bin_of(oldest)])

    def _bin_of(self, item: WaitingRequest) -> int:
        found = self._bins.get(item.request)
        if found is None:
            found = bisect_right(self._boundaries, self._predictor(item))
            self._bins[item.request] = found
        return found

    def _leave(self, members: list[int]) -> tuple[int, ...]:
        for request in members:
            del self._bins[request]
        return tuple(members)


def uniform_boundaries(shortest: float, longest: float, bins: int) -> tuple[float, ...]:
    """Return the k - 1 boundaries of k equally wide bins: best for uniform lengths (Lemma 4.1)."""
    _check_bins(bins)
    width = (longest - shortest) / bins
    return tuple(shortest + index * width for index in range(1, bins))


def quantile_boundaries(lengths: Sequence[float], bins: int) -> tuple[float, ...]:
    """Return boundaries that put equally many of the given lengths into each bin.

    Lengths that repeat can make two boundaries equal; the bin between them stays empty.
    """
    _check_bins(bins)
    if not lengths:
        raise SpecError("multi-bin batching: found no lengths, expected at least one")
    ordered = sorted(lengths)
    return tuple(ordered[len(ordered) * index // bins] for index in range(1, bins))


def _check_bins(bins: int) -> None:
    if bins < 1:
        raise SpecError(f"multi-bin batching: found {bins} bins, expected at least 1")
