"""Hybrid micro-batches: one size for prefill and another for decode (LLM-PQ, Sec. 4.2).

``prefill`` prompts are prefilled at a time, then all sequences are decoded in micro-batches of
``decode``. Waiting requests take the slots of finished sequences between steps. Prompts shorter
than planned share a micro-batch, up to the tokens that the plan has memory for: a step of few
tokens reads all weights and runs all operators for them alone.
"""

from __future__ import annotations

from itertools import islice

from llmpq.batching.policy_scheduler import Decision, Decode, Prefill, SchedulerView, Wait
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import Phase


class HybridPolicy:
    """The policy of a plan's ``micro_batching``.

    Args:
        micro_batching: sequences of a micro-batch in each phase.
        num_slots: number of KV slots ``B``.
        num_stages: stages of the pipeline.
        prompt_tokens: of a prompt, as planned; by default no prompt is shorter than planned.
    """

    def __init__(
        self,
        *,
        micro_batching: MicroBatching,
        num_slots: int,
        num_stages: int,
        prompt_tokens: int = 0,
    ) -> None:
        self._sizes = micro_batching
        self._num_stages = num_stages
        self._prefill_tokens = micro_batching.prefill * prompt_tokens
        # The head's temporary memory is that of the larger micro-batch.
        self._most = max(micro_batching.prefill, micro_batching.decode)
        # Empty slots waste decode work; a prefill of one prompt reads all weights for it alone.
        # Refilling a quarter of the slots at a time limits both.
        self._quarter = max(1, num_slots // 4)

    @property
    def holds_finished(self) -> bool:
        """False: a finished sequence releases its slot at once."""
        return False

    def decide(self, view: SchedulerView) -> Decision:
        """Prefill first, so that decode micro-batches are full afterwards."""
        available = len(view.fitting(view.free_slots))
        full = self._full(view)
        if available and self._is_time_to_prefill(view, min(available, full), full):
            size = min(available, full, self._share(view, available))
            return Prefill(requests=tuple(item.request for item in islice(view.waiting, size)))
        if view.ready and self._is_time_to_decode(view):
            chosen = islice(view.ready, self._sizes.decode)
            return Decode(slots=tuple(item.slot for item in chosen))
        return Wait()

    def _full(self, view: SchedulerView) -> int:
        """Return how many of the first waiting requests make a full micro-batch."""
        size = self._sizes.prefill
        if not self._prefill_tokens:
            return size
        tokens = 0
        for place, item in enumerate(islice(view.waiting, self._most)):
            tokens += item.prompt_tokens
            if place >= size and tokens > self._prefill_tokens:
                return place
        return max(size, min(self._most, len(view.waiting)))

    def _share(self, view: SchedulerView, available: int) -> int:
        """Return the size at which every stage has a micro-batch, at least the planned one."""
        wave = available + view.sequences_in_flight(Phase.PREFILL)
        return max(self._sizes.prefill, -(-wave // self._num_stages))

    def _is_time_to_prefill(self, view: SchedulerView, room: int, full: int) -> bool:
        is_decoding = view.num_in_flight(Phase.DECODE) > 0 or any(
            sequence.new_tokens > 1 for sequence in view.ready
        )
        return not is_decoding or room >= min(full, self._quarter, len(view.waiting))

    def _is_time_to_decode(self, view: SchedulerView) -> bool:
        ready = len(view.ready)
        if ready < self._sizes.decode and view.num_in_flight(Phase.PREFILL):
            # New sequences wait for a full micro-batch; sequences already decoding do not.
            return any(sequence.new_tokens > 1 for sequence in view.ready)
        # With fewer micro-batches than stages a small one costs nothing, as stages would idle.
        # Otherwise sequences wait to be merged, so that micro-batches do not shrink over time.
        alive = ready + view.sequences_in_flight(Phase.DECODE)
        wanted = max(self._num_stages, -(-alive // self._sizes.decode))
        return view.num_in_flight(Phase.DECODE) < wanted
