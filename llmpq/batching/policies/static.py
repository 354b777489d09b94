"""Static batching: a batch is prefilled and decoded until its last answer is complete.

As in FasterTransformer (ExeGPT, Sec. 2), finished sequences stay in the batch. A ``BatchFormer``
chooses the batch: in order of arrival, or by predicted length (``multibin``).
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from llmpq.batching.policy_scheduler import Decision, Decode, Prefill, SchedulerView, Wait
from llmpq.errors import SpecError
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import Phase


class BatchFormer(Protocol):
    """Chooses the requests of the next batch."""

    @property
    def max_wait_s(self) -> float | None:
        """Seconds that a request may wait for a full batch; ``None`` for no limit."""
        ...

    def __call__(self, view: SchedulerView) -> tuple[int, ...]:
        """Return the next batch; empty to wait for more requests."""
        ...


class StaticPolicy:
    """Serves one batch after the other.

    Args:
        former: chooses the batches.
        micro_batching: maximum sequences of a micro-batch in each phase.
        holds_finished: keep finished sequences in the batch (FasterTransformer); if false, they
            leave it (DeepSpeed with early termination).
    """

    def __init__(
        self, *, former: BatchFormer, micro_batching: MicroBatching, holds_finished: bool = True
    ) -> None:
        self._former = former
        self._sizes = micro_batching
        self._holds_finished = holds_finished
        self._to_prefill: deque[int] = deque()
        self._groups: dict[int, tuple[int, ...]] = {}  # request -> its decode micro-batch

    @property
    def holds_finished(self) -> bool:
        """Whether finished sequences stay until the whole batch is finished."""
        return self._holds_finished

    def decide(self, view: SchedulerView) -> Decision:
        """Prefill the whole batch, then decode its micro-batches unchanged."""
        if self._to_prefill:  # some that were chosen may have been removed from the queue
            waiting = {item.request for item in view.waiting}
            self._to_prefill = deque(one for one in self._to_prefill if one in waiting)
        if not (self._to_prefill or view.ready or view.in_flight):
            self._to_prefill.extend(self._former(view))
            self._groups.clear()
        if self._to_prefill:
            size = min(self._sizes.prefill, len(self._to_prefill))
            return Prefill(requests=tuple(self._to_prefill.popleft() for _ in range(size)))
        if not view.ready and not view.in_flight:
            return Wait(until_s=_flush_s(view, self._former.max_wait_s))
        self._form_groups(view)
        return self._next_group(view)

    def _form_groups(self, view: SchedulerView) -> None:
        """Assign newly prefilled sequences to fixed decode micro-batches."""
        fresh = [item.request for item in view.ready if item.request not in self._groups]
        while len(fresh) >= self._sizes.decode or (fresh and not view.num_in_flight(Phase.PREFILL)):
            group, fresh = tuple(fresh[: self._sizes.decode]), fresh[self._sizes.decode :]
            self._groups.update((request, group) for request in group)

    def _next_group(self, view: SchedulerView) -> Decision:
        for first in view.ready:
            group = self._groups.get(first.request)
            if group is not None:
                # Members complete together; finished ones are no longer in the view.
                return Decode(slots=tuple(s.slot for s in view.ready if s.request in group))
        return Wait()


class FirstComeFormer:
    """Takes requests in order of arrival, a full batch at a time.

    Args:
        batch: requests of a batch.
        max_wait_s: serve an incomplete batch when its oldest request has waited that long; ``None``
            for no limit.
    """

    def __init__(self, *, batch: int, max_wait_s: float | None = None) -> None:
        if batch < 1:
            raise SpecError(f"static batching: found a batch of {batch}, expected at least 1")
        self._batch = batch
        self.max_wait_s = max_wait_s

    def __call__(self, view: SchedulerView) -> tuple[int, ...]:
        """Return the next batch."""
        chosen = view.fitting(self._batch)
        # Fewer fit where some are longer than a slot.
        is_full = len(chosen) == self._batch or len(chosen) < len(view.waiting)
        if not is_full and not must_flush(view, self.max_wait_s):
            return ()
        return tuple(item.request for item in chosen)


def must_flush(view: SchedulerView, max_wait_s: float | None) -> bool:
    """Whether an incomplete batch must be served: no request will arrive, or it waited too long."""
    flush_s = _flush_s(view, max_wait_s)
    is_late = flush_s is not None and view.now_s >= flush_s
    return bool(view.waiting) and (view.is_closed or is_late)


def _flush_s(view: SchedulerView, max_wait_s: float | None) -> float | None:
    """Return when the oldest request reaches ``max_wait_s``; ``None`` for never."""
    if max_wait_s is None or not view.waiting:
        return None
    return next(iter(view.waiting)).arrival_s + max_wait_s
