"""RRA: encode once, decode ``N_D`` iterations, and again (ExeGPT, Sec. 4.1).

A cycle encodes as many requests as finished in the previous cycle, then decodes ``N_D`` tokens of
every sequence.

In a pipeline the next cycle starts when the first micro-batch of the last iteration completes: its
free slots are filled with prompts at once, so that stages do not idle between cycles. Prompts that
do not fit are encoded in the next cycle.

``Admission`` adjusts the workload of RRA and WAA: how many requests to encode now (Sec. 5.2).
The prompt tokens of an encoding batch stay within a threshold of the mean: long prompts leave
requests to the next one, short ones take more. The batch grows when the decoding batch is below its
target, and never fills more than that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice

from llmpq.batching.policy_scheduler import Decision, Decode, Prefill, SchedulerView, Wait
from llmpq.errors import SpecError
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import Phase

PROMPT_THRESHOLD = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Batch sizes of RRA and WAA, and their tolerance.

    Attributes:
        encode_batch: mean requests of an encoding batch ``B_E``.
        decode_batch: sequences decoded together ``B_D``, also the maximum that hold a slot.
        mean_prompt_tokens: mean length of a prompt; 0 ignores prompt lengths.
        threshold: allowed relative deviation of a batch from its mean; of prompt tokens at least
            ``PROMPT_THRESHOLD``, also where every encoding refills the decoding batch (0).
    """

    encode_batch: int
    decode_batch: int
    mean_prompt_tokens: float = 0.0
    threshold: float = 0.25

    def __post_init__(self) -> None:
        if not 1 <= self.encode_batch <= self.decode_batch:
            raise SpecError(
                f"admission: found an encode batch of {self.encode_batch} and a decode batch of "
                f"{self.decode_batch}, expected 1 <= encode batch <= decode batch"
            )
        if not self.threshold >= 0:
            raise SpecError(f"admission: found threshold {self.threshold}, expected at least 0")

    def choose(self, view: SchedulerView, rows: int) -> tuple[int, ...]:
        """Return the requests of an encoding batch, in order of arrival; may be empty.

        It has ``rows`` requests at most, or more where their prompts are short.
        """
        most = self.encode_batch
        if view.alive + most < self._smallest:
            most += max(1, round(self.encode_batch * self.threshold))
        most = min(most, rows)
        chosen = self.take(view, most, self.most_tokens(most))
        while len(chosen) >= most:
            tokens = sum(item.prompt_tokens for item in islice(view.waiting, len(chosen)))
            more = self.more(most, len(chosen), tokens)
            longer = self.take(view, len(chosen) + more, self.most_tokens(most))
            if len(longer) == len(chosen):
                break
            chosen = longer
        return chosen

    def wanted(self, alive: int) -> int:
        """Return how many requests to encode until the next encoding.

        ``encode_batch``, or more when the decoding batch is too small, as at the start of a run.
        """
        if alive + self.encode_batch >= self._smallest:
            return self.encode_batch
        return max(self.encode_batch, math.ceil(self._smallest) - alive)

    def most_tokens(self, batch: int) -> float:
        """Return the most prompt tokens of an encoding batch of so many requests."""
        return batch * self.mean_prompt_tokens * (1 + self._prompt_threshold) or math.inf

    def more(self, batch: int, taken: int, tokens: int) -> int:
        """Return how many requests an encoding batch still takes, if they are as those so far.

        Args:
            batch: its requests at mean lengths.
            taken: its requests so far.
            tokens: prompt tokens of these.
        """
        if tokens >= self.most_tokens(batch):
            return 0
        if taken < batch or not self.mean_prompt_tokens:
            return batch - taken
        short = batch * self.mean_prompt_tokens * (1 - self._prompt_threshold) - tokens
        return max(0, math.ceil(short * taken / max(1, tokens)))

    def take(self, view: SchedulerView, most: int, most_tokens: float) -> tuple[int, ...]:
        """Return at most ``most`` requests to encode, in order of arrival.

        Fewer when slots are short, or the decoding batch or the prompts would become too large; one
        request is encoded, however long.
        """
        room = min(most, self.decode_batch - view.alive)
        chosen: list[int] = []
        tokens = 0
        for item in view.fitting(room):
            tokens += item.prompt_tokens
            if chosen and tokens > most_tokens:
                break
            chosen.append(item.request)
        return tuple(chosen)

    @property
    def _prompt_threshold(self) -> float:
        return max(self.threshold, PROMPT_THRESHOLD)

    @property
    def _smallest(self) -> float:
        return self.decode_batch * (1 - self.threshold)


class RraPolicy:
    """Round-robin allocation of encoding and decoding.

    Args:
        admission: batch sizes and their tolerance.
        decode_iterations: decode iterations between two encodings ``N_D``.
        micro_batching: maximum sequences of a micro-batch in each phase.
    """

    def __init__(
        self, *, admission: Admission, decode_iterations: int, micro_batching: MicroBatching
    ) -> None:
        self._admission = admission
        self.adjust(decode_iterations)
        self._sizes = micro_batching
        self._to_encode = 0  # remaining requests of this cycle
        self._batch = self._taken = self._tokens = 0  # requests at mean lengths; encoded, tokens
        self._made: dict[
            int, int
        ] = {}  # request -> tokens of this cycle, including those in flight

    @property
    def holds_finished(self) -> bool:
        """False: a finished sequence releases its slot at once."""
        return False

    def adjust(self, decode_iterations: int) -> None:
        """Change ``N_D`` from the next decision on.

        Raises:
            SpecError: ``decode_iterations`` is less than 1.
        """
        if decode_iterations < 1:
            raise SpecError(f"RRA: found {decode_iterations} decode iterations, expected 1 or more")
        self._decode_iterations = decode_iterations

    def decide(self, view: SchedulerView) -> Decision:
        """Continue the cycle, or start the next one."""
        if not self._to_encode and self._is_cycle_over(view):
            self._batch = self._to_encode = self._admission.wanted(view.alive)
            self._taken = self._tokens = 0
            self._made.clear()
        if self._to_encode:
            decision = self._encode(view)
            if decision is not None:
                return decision
            self._to_encode = 0
        return self._decode(view)

    def _is_cycle_over(self, view: SchedulerView) -> bool:
        """Whether all tokens of the cycle are computed or in flight."""
        if view.num_in_flight(Phase.PREFILL):
            return False
        numbers = [sequence.request for sequence in view.ready]
        numbers += [request for batch in view.in_flight for request in batch.requests]
        return all(self._made.get(number, 0) >= self._decode_iterations for number in numbers)

    def _encode(self, view: SchedulerView) -> Decision | None:
        """Encode a micro-batch; ``None`` if this cycle has no room for more."""
        left = self._admission.most_tokens(self._batch) - self._tokens
        chosen = self._admission.take(view, min(self._sizes.prefill, self._to_encode), left)
        if not chosen:
            return None
        self._taken += len(chosen)
        self._tokens += sum(item.prompt_tokens for item in islice(view.waiting, len(chosen)))
        self._to_encode = self._admission.more(self._batch, self._taken, self._tokens)
        return Prefill(requests=chosen)

    def _decode(self, view: SchedulerView) -> Decision:
        due = [
            sequence
            for sequence in view.ready
            if self._made.get(sequence.request, 0) < self._decode_iterations
        ]
        # Micro-batches are merged as sequences finish; new sequences wait for a full one.
        if len(due) < self._sizes.decode and self._is_worth_waiting(view):
            return Wait()
        chosen = due[: self._sizes.decode]
        if not chosen:
            return Wait()
        for sequence in chosen:
            self._made[sequence.request] = self._made.get(sequence.request, 0) + 1
        return Decode(slots=tuple(sequence.slot for sequence in chosen))

    def _is_worth_waiting(self, view: SchedulerView) -> bool:
        num_batches = view.num_in_flight(Phase.DECODE)
        alive = len(view.ready) + view.sequences_in_flight(Phase.DECODE)
        return view.num_in_flight(Phase.PREFILL) > 0 or num_batches >= -(
            -alive // self._sizes.decode
        )
