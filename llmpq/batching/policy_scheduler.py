"""Scheduler of steps that a batching policy decides: prompts as a whole, or one token each.

The scheduler calls its policy whenever the pipeline can take another micro-batch: from a
``SchedulerView`` the policy makes a ``Decision``. The runtime's engine and the simulator both use
this scheduler. Equal views give equal decisions, so equal arrivals, clocks and completions give
equal steps in both.

A sequence has a slot, memory for as many KV blocks as the longest one needs, from its prefill until
its answer is complete; one longer than planned has several, and its prompt takes several steps. A
prompt begins after the blocks of an earlier one with the same content, where layers keep all keys
and values.

With speculative decoding, a sequence that decodes may have draft tokens after its next one. The
same step writes their keys and values to the slot; those of rejected tokens are overwritten.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice
from typing import TYPE_CHECKING, Protocol

from llmpq.batching.blocks import BlockAllocator, BlockKey, keys_of, root_key
from llmpq.batching.engine_step import (
    NO_TOKENS,
    DraftCandidate,
    EngineLimits,
    EngineRequest,
    EngineStep,
    ScheduledChunk,
    StepDrafts,
)
from llmpq.batching.speculation import MAX_STEP_TOKENS, DraftCredit
from llmpq.errors import LlmpqError
from llmpq.spec.precision import Phase
from llmpq.spec.runtime_constants import KV_BLOCK_SIZE

if TYPE_CHECKING:  # it adjusts policies, which import this module
    from llmpq.batching.drift import DriftMonitor


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRequest:
    """A request that holds no slot yet.

    Attributes:
        request: number, unique in the run.
        prompt_tokens: length of the prompt.
        arrival_s: arrival time on the run's clock.
        slots: that it needs: several for a sequence longer than a slot.
        predicted_tokens: predicted answer tokens; ``None`` where nothing predicts them.
    """

    request: int
    prompt_tokens: int
    arrival_s: float = 0.0
    slots: int = 1
    predicted_tokens: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadySequence:
    """A sequence that holds a slot and can be decoded.

    Attributes:
        request: number of its request.
        slot: its KV slot.
        context_tokens: tokens of prompt and answer so far.
        new_tokens: tokens of the answer so far; 1 right after prefill.
        is_finished: its answer is complete but it keeps its slot, and its new tokens are
            discarded; only under a policy that ``holds_finished``.
    """

    request: int
    slot: int
    context_tokens: int
    new_tokens: int
    is_finished: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlightBatch:
    """A micro-batch that was dispatched into the pipeline and has not come back.

    Attributes:
        number: counted from 0 in the order of dispatch.
        phase: prefill or decode.
        sequences: its members as they were at dispatch; for a prefill with an empty answer.
    """

    number: int
    phase: Phase
    sequences: tuple[ReadySequence, ...]

    @property
    def requests(self) -> tuple[int, ...]:
        """The number of each sequence's request."""
        return tuple(sequence.request for sequence in self.sequences)

    @property
    def slots(self) -> tuple[int, ...]:
        """The slot of each sequence."""
        return tuple(sequence.slot for sequence in self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerView:
    """The read-only state for a decision.

    Attributes:
        waiting: requests without a slot, in order of arrival.
        ready: sequences that can be decoded, the one ready longest first.
        free_slots: slots without an owner.
        in_flight: micro-batches in the pipeline, the oldest first.
        open_phases: phases of which the pipeline can take a micro-batch now.
        is_closed: whether no further request will arrive.
        now_s: time on the run's clock.
    """

    waiting: Sequence[WaitingRequest]
    ready: Sequence[ReadySequence]
    free_slots: int
    in_flight: tuple[InFlightBatch, ...] = ()
    open_phases: tuple[Phase, ...] = (Phase.PREFILL, Phase.DECODE)
    is_closed: bool = True
    now_s: float = 0.0

    def sequences_in_flight(self, phase: Phase) -> int:
        """Return the number of sequences in flight in a phase."""
        return sum(len(batch.sequences) for batch in self.in_flight if batch.phase is phase)

    def num_in_flight(self, phase: Phase) -> int:
        """Return the number of micro-batches in flight in a phase."""
        return sum(batch.phase is phase for batch in self.in_flight)

    def can(self, phase: Phase) -> bool:
        """Whether the pipeline can take a micro-batch of the phase now."""
        return phase in self.open_phases

    def fitting(self, most: int) -> list[WaitingRequest]:
        """Return the first waiting requests, at most so many, that the free slots hold."""
        found: list[WaitingRequest] = []
        free = self.free_slots
        for item in islice(self.waiting, max(0, min(most, free))):
            free -= item.slots
            if free < 0:
                break
            found.append(item)
        return found

    @property
    def alive(self) -> int:
        """Sequences that hold a slot and are not finished."""
        ready = sum(not sequence.is_finished for sequence in self.ready)
        return ready + sum(len(batch.sequences) for batch in self.in_flight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Assign slots to these requests and prefill them as one micro-batch."""

    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Decode the sequences in these slots as one micro-batch."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing until a micro-batch comes back or a request arrives.

    Attributes:
        until_s: or until this time.
    """

    until_s: float | None = None


Decision = Prefill | Decode | Wait


class BatchingPolicy(Protocol):
    """Decides which micro-batch to dispatch next.

    A policy may have state; its decisions depend on the sequence of views alone.
    """

    @property
    def holds_finished(self) -> bool:
        """Whether finished sequences stay in their batch until its last one is finished."""
        ...

    def decide(self, view: SchedulerView) -> Decision:
        """Return the next step; not ``Wait`` if nothing is in flight and no request will arrive."""
        ...


def check_decision(view: SchedulerView, decision: Decision) -> None:
    """Check that the view allows a decision.

    Raises:
        LlmpqError: the decision is empty or names a request that is not waiting, a slot that is not
            ready, a member twice, too many requests or a full phase, or waits without a reason.
    """
    if isinstance(decision, Wait):
        is_for_nothing = not view.in_flight and view.is_closed and decision.until_s is None
        if is_for_nothing and (view.waiting or view.ready):
            raise LlmpqError("batching policy: waits although nothing is in flight")
        return
    phase = Phase.PREFILL if isinstance(decision, Prefill) else Phase.DECODE
    if not view.can(phase):
        raise LlmpqError(f"batching policy: found a {phase} step, but those stages are full")
    if isinstance(decision, Prefill):
        _check_members(decision.requests, (item.request for item in view.waiting), "request")
        chosen = set(decision.requests)
        needed = len(chosen)  # at least
        if needed <= view.free_slots:
            waiting = (item.slots for item in view.waiting if item.request in chosen)
            needed = sum(islice(waiting, len(chosen)))  # the queue may be long
        if needed > view.free_slots:
            raise LlmpqError(
                f"batching policy: found {len(chosen)} requests to prefill that need {needed} "
                f"slots, expected at most the {view.free_slots} free slots"
            )
    else:
        _check_members(decision.slots, (item.slot for item in view.ready), "slot")


def _check_members(chosen: tuple[int, ...], available: Iterable[int], noun: str) -> None:
    missing = set(chosen)
    is_once = len(missing) == len(chosen) > 0
    for number in available:
        if not missing:
            break  # the queue may be long, and policies mostly take its head
        missing.discard(number)
    if missing or not is_once:
        raise LlmpqError(
            f"batching policy: found {noun}s {list(chosen)}, "
            f"expected at least one {noun} that can be taken, each once"
        )


BOTH_PHASES = (Phase.PREFILL, Phase.DECODE)


def slot_limits(num_slots: int, max_tokens: int, block_size: int = KV_BLOCK_SIZE) -> EngineLimits:
    """Return the limits of slots for sequences of up to ``max_tokens`` each."""
    return EngineLimits(
        token_budget=num_slots * max_tokens,
        max_sequences=num_slots,
        num_blocks=num_slots * -(-max_tokens // block_size),
        block_size=block_size,
        prefix_caching=False,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class _SlotRequest:
    """An unfinished request.

    Attributes:
        origin: the step that prefilled it.
        keys: of the full blocks of its prompt, where they may be found.
        cached: tokens of the prompt whose keys and values were found.
        repeated: accepted draft tokens that the next step computes again, in layers with a state.
    """

    request: EngineRequest
    credit: DraftCredit
    origin: int = 0
    keys: list[BlockKey] = field(default_factory=list)
    cached: int = 0
    repeated: int = 0
    is_aborted: bool = False


class PolicyScheduler:
    """The requests of a run: queue, slots and micro-batches in flight.

    A slot has at most one owner. The lowest free slot is taken first, which keeps live sequences at
    the front of the cache without copies (compaction in ExeGPT, Sec. 3), as far as no prompt begins
    with blocks of another.

    Args:
        policy: decides what to dispatch next.
        limits: of the engine: ``max_sequences`` slots share its blocks evenly.
        depth: how many steps may be in flight.
        part_tokens: most tokens of a prompt in a step; a longer one takes several steps. ``None``
            for any.
        scored_tokens: most tokens of a step that are of prompts with a score at every position.
        drafts: of its sequences; those of another scheduler know what a draft token costs.
        monitor: receives started requests and finished answers.
        first_number: number of the first step.

    Attributes:
        next_number: number of the next step.
        wake_s: when a policy that waits would decide otherwise; infinite for never.
    """

    def __init__(  # noqa: PLR0913  the parts of a run
        self,
        policy: BatchingPolicy,
        limits: EngineLimits,
        depth: PipelineDepth,
        *,
        part_tokens: int | None = None,
        scored_tokens: int = 1,
        drafts: StepDrafts | None = None,
        monitor: DriftMonitor | None = None,
        first_number: int = 0,
    ) -> None:
        self._policy = policy
        self._limits = limits
        self._depth = depth
        self._part_tokens = part_tokens or sys.maxsize
        self._scored_tokens = scored_tokens
        self._monitor = monitor
        self.drafts = drafts or limits.new_drafts()
        self._slot_blocks = limits.num_blocks // limits.max_sequences
        self._slot_window_blocks = limits.num_window_blocks // limits.max_sequences
        self._free_slots = list(range(limits.max_sequences))  # a heap
        self._tables: dict[int, Sequence[int]] = {}  # blocks of a sequence, by its slot
        keeps_all = limits.window_tokens is None and limits.switches_after is None
        has_prefixes = keeps_all and not (limits.num_state_slots or depth.is_split)
        self._allocator: BlockAllocator | None = None
        if limits.prefix_caching and has_prefixes:
            self._allocator = BlockAllocator(limits.num_blocks)
        self._requests: dict[int, _SlotRequest] = {}  # unfinished ones
        self._waiting: deque[WaitingRequest] = deque()
        self._ready: dict[int, ReadySequence] = {}  # by slot, in the order they became ready
        self._in_flight: dict[int, InFlightBatch] = {}  # by number, in order
        self._steps: dict[int, tuple[float, EngineStep]] = {}  # with when they began
        self._parts: deque[EngineStep] = deque()  # of the prompts of a micro-batch, to be taken
        self._slots_of: dict[int, tuple[int, ...]] = {}  # of a sequence, by the first one
        self._state_slots = list(range(limits.max_sequences))  # by the sequence's slot
        self._draft_slots = list(range(limits.max_sequences, limits.num_state_slots))
        self._unfinished = 0  # sequences that hold a slot and whose answer is incomplete
        self._is_closed = False
        self.next_number = first_number
        self.wake_s = math.inf
        self.prefix_cache_hits = 0
        """Prompt tokens whose keys and values were found."""

    @property
    def is_done(self) -> bool:
        """Whether every request has been answered and none will come."""
        return self._is_closed and not (self._waiting or self._ready or self._in_flight)

    def add(self, request: EngineRequest) -> None:
        """Put a request at the end of the queue.

        Raises:
            CapacityError: its prompt and longest answer do not fit into all slots.
            LlmpqError: it comes after the last one.
        """
        if self._is_closed:
            raise LlmpqError(f"request {request.request} arrives after the last one")
        available = self._limits.max_sequences * self._slot_blocks
        slots = -(-self._limits.needed_blocks(request, available) // self._slot_blocks)
        self._requests[request.request] = _SlotRequest(
            request=request, credit=self.drafts.first_credit()
        )
        self._waiting.append(
            WaitingRequest(
                request=request.request,
                prompt_tokens=request.prompt_tokens,
                arrival_s=request.arrival_s,
                slots=slots,
                predicted_tokens=request.predicted_tokens,
            )
        )

    def close(self) -> None:
        """Declare that no further request will arrive."""
        self._is_closed = True

    def drain(self) -> tuple[int, ...]:
        """Remove the waiting requests; those that hold a slot are still finished.

        Returns:
            the removed requests, in the order of the queue.
        """
        dropped = tuple(item.request for item in self._waiting)
        self._waiting.clear()
        for request in dropped:
            del self._requests[request]
        self._is_closed = True
        return dropped

    def abort(self, request: int) -> bool:
        """Remove a request, or end it with its step in flight.

        Returns:
            Whether the request was unfinished.
        """
        found = self._requests.get(request)
        if found is None or found.is_aborted:
            return False
        found.is_aborted = True
        for item in self._waiting:
            if item.request == request:
                self._waiting.remove(item)
                del self._requests[request]
                return True
        for slot, sequence in self._ready.items():
            if sequence.request == request:
                self._leave(replace(sequence, is_finished=True), slot)
                self._release_batch()
                return True
        return True

    def view(self, now_s: float, open_phases: tuple[Phase, ...] = BOTH_PHASES) -> SchedulerView:
        """Return what a policy may see."""
        return SchedulerView(
            waiting=self._waiting,
            ready=tuple(self._ready.values()),
            free_slots=len(self._free_slots),
            in_flight=tuple(self._in_flight.values()),
            open_phases=open_phases,
            is_closed=self._is_closed,
            now_s=now_s,
        )

    def schedule(self, now_s: float) -> EngineStep | None:
        """Return the step that the policy decides, ``None`` when it waits.

        Raises:
            LlmpqError: the decision is not allowed.
        """
        self.wake_s = math.inf
        phases = [step.phase for _, step in self._steps.values()]
        if self._parts:
            if len(phases) >= self._depth.max_in_flight(Phase.PREFILL):
                return None
            return self._begin(self._parts.popleft(), now_s)
        open_phases = self._depth.open_phases(phases)
        if not open_phases:
            return None
        view = self.view(now_s, open_phases)
        decision = self._policy.decide(view)
        check_decision(view, decision)
        if isinstance(decision, Wait):
            self.wake_s = math.inf if decision.until_s is None else decision.until_s
            return None
        batch = self._take(decision)
        self._parts.extend(self._steps_of(batch))
        self._in_flight[self._parts[-1].number] = batch
        return self._begin(self._parts.popleft(), now_s)

    def _begin(self, step: EngineStep, now_s: float) -> EngineStep:
        self._steps[step.number] = now_s, step
        if self._allocator is not None and step.phase is Phase.PREFILL:
            for chunk in step.chunks:
                self._cache_blocks(chunk, self._allocator)
        return step

    def _cache_blocks(self, chunk: ScheduledChunk, allocator: BlockAllocator) -> None:
        """Let the next steps find the blocks of a prompt that this step fills."""
        found, size = self._requests.get(chunk.request), self._limits.block_size
        if found is None or found.is_aborted:  # it has any tokens
            return
        # Sequences that are held once they are finished write to their last block.
        last = self._limits.needed_blocks(found.request, self._limits.num_blocks) - 1
        end = min((chunk.first + chunk.count) // size, len(found.keys), last)
        for index in range(chunk.first // size, end):
            allocator.cache(chunk.blocks[index], found.keys[index])

    def complete_drafts(self, step: EngineStep, now_s: float, *, has_ended: bool = False) -> None:
        """Take the time at which the draft model has computed the drafts of a new step, or ended.

        Later steps have no drafts once it has ended.
        """
        start_s, _ = self._steps[step.number]
        self._steps[step.number] = now_s, step
        self.drafts.measure_works(step.drafts, step.rows, now_s - start_s, has_ended=has_ended)

    def complete(
        self,
        number: int,
        tokens: Mapping[int, int],
        finished: Collection[int] = (),
        accepted: Mapping[int, Sequence[int]] = NO_TOKENS,
        *,
        now_s: float | None = None,
    ) -> None:
        """Take a step out of the pipeline, with new tokens for each of its sequences.

        Args: as in :class:`StepScheduler`; sequences that were finished before make no token.

        Raises:
            LlmpqError: no such step is in flight, or a token is missing.
        """
        if number not in self._steps:
            raise LlmpqError(f"step {number} completes but is not in flight")
        start_s, step = self._steps.pop(number)
        is_decode = step.phase is Phase.DECODE
        counts = self.drafts.is_on and (is_decode or not self._depth.is_split)
        if now_s is not None and counts:
            rows = sum(chunk.count for chunk in step.chunks) if is_decode else None
            self.drafts.measure_step(start_s, now_s, rows)
        batch = self._in_flight.pop(number, None)
        if batch is None:  # a part of prompts
            return
        for before, chunk in zip(batch.sequences, step.chunks, strict=True):
            after = before
            if not before.is_finished:
                right = accepted.get(before.request, ())
                after = self._extended(before, chunk, tokens, right, before.request in finished)
                if is_decode and self.drafts.is_on:
                    self._verify(before, chunk, len(right), len(step.chunks))
            if after.is_finished and not before.is_finished:
                self._leave(after, before.slot)
            else:
                self._ready[before.slot] = after
        self._release_batch()

    def _verify(
        self, sequence: ReadySequence, chunk: ScheduledChunk, accepted: int, rows: int
    ) -> None:
        """Take how many draft tokens are right; go back to the state before them unless all are."""
        found, proposed = self._requests[sequence.request], chunk.num_draft_tokens
        goes_back = chunk.draft_slot >= 0 and accepted < proposed
        self.drafts.verify(
            sequence.request, found.credit, accepted, proposed, rows, is_repeated=goes_back
        )
        found.repeated = accepted if goes_back else 0
        if chunk.draft_slot >= 0:
            self._draft_slots.append(chunk.draft_slot if goes_back else chunk.slot)
            self._state_slots[sequence.slot] = chunk.slot if goes_back else chunk.draft_slot

    def _extended(
        self,
        before: ReadySequence,
        chunk: ScheduledChunk,
        tokens: Mapping[int, int],
        accepted: Sequence[int],
        is_finished: bool,
    ) -> ReadySequence:
        """Return a sequence with its new tokens."""
        found = self._requests[before.request]
        count = 1 + len(accepted) if before.request in tokens else 0
        if not (count or is_finished or found.is_aborted):
            raise LlmpqError(f"step: found no token of request {before.request}")
        assert count <= 1 + chunk.num_draft_tokens
        return ReadySequence(
            request=before.request,
            slot=before.slot,
            context_tokens=before.context_tokens + count,
            new_tokens=before.new_tokens + count,
            is_finished=is_finished or found.is_aborted,
        )

    def _leave(self, sequence: ReadySequence, slot: int) -> None:
        """End a sequence; its slot is free once the policy does not hold it."""
        self._unfinished -= 1
        self.drafts.forget(sequence.request)
        del self._requests[sequence.request]
        if self._monitor is not None:
            self._monitor.finished(sequence.request, sequence.new_tokens)
        if self._policy.holds_finished:
            self._ready[slot] = sequence
            return
        self._ready.pop(slot, None)
        self._free(slot)

    def _release_batch(self) -> None:
        """Free the slots of a finished batch; members in flight are freed when they complete."""
        if self._unfinished or not self._policy.holds_finished:
            return
        for slot in self._ready:
            self._free(slot)
        self._ready.clear()

    def _free(self, slot: int) -> None:
        for own in self._slots_of.pop(slot):
            heapq.heappush(self._free_slots, own)
        blocks = self._tables.pop(slot)
        if self._allocator is not None:
            self._allocator.free(blocks)

    def _take(self, decision: Prefill | Decode) -> InFlightBatch:
        if isinstance(decision, Prefill):
            sequences = self._admit(decision.requests)
        else:
            sequences = [self._ready.pop(slot) for slot in decision.slots]
        phase = Phase.PREFILL if isinstance(decision, Prefill) else Phase.DECODE
        return InFlightBatch(number=self.next_number, phase=phase, sequences=tuple(sequences))

    def _admit(self, requests: Sequence[int]) -> list[ReadySequence]:
        """Take requests from the queue and give them slots; the queue keeps its order."""
        chosen = set(requests)
        found: dict[int, WaitingRequest] = {}
        passed_over = []
        while chosen:
            item = self._waiting.popleft()
            if item.request in chosen:
                chosen.remove(item.request)
                found[item.request] = item
                self._requests[item.request].origin = self.next_number
            else:
                passed_over.append(item)
        self._waiting.extendleft(reversed(passed_over))
        self._unfinished += len(requests)
        if self._monitor is not None:
            self._monitor.started(requests)
        return [self._with_slots(found[request]) for request in requests]

    def _with_slots(self, item: WaitingRequest) -> ReadySequence:
        slots = tuple(heapq.heappop(self._free_slots) for _ in range(item.slots))
        self._slots_of[slots[0]] = slots
        self._tables[slots[0]] = self._table(self._requests[item.request], slots)
        return ReadySequence(
            request=item.request,
            slot=slots[0],
            context_tokens=item.prompt_tokens,
            new_tokens=0,
        )

    def _table(self, found: _SlotRequest, slots: Sequence[int]) -> Sequence[int]:
        """Return the blocks of a sequence, the first of which may be those of earlier prompts."""
        width, limits, request = self._slot_blocks, self._limits, found.request
        if self._allocator is None:
            runs = [range(slot * width, (slot + 1) * width) for slot in slots]
            return runs[0] if len(runs) == 1 else tuple(chain(*runs))
        prefix: Sequence[BlockKey] = ()
        if request.token_ids is not None and not request.scores_prompt:
            tokens = request.prompt_tokens
            root = root_key(request.cache_salt, limits.rope_table(tokens, tokens))
            found.keys = keys_of(request.token_ids, root, limits.block_size)
            # The last token is always computed, because its output is needed.
            most = (tokens - 1) // limits.block_size
            prefix = self._allocator.find(found.keys[:most])
            found.cached = len(prefix) * limits.block_size
            self.prefix_cache_hits += found.cached
        needed = limits.needed_blocks(request, limits.num_blocks)
        return self._allocator.allocate(needed - len(prefix), prefix)

    def _steps_of(self, batch: InFlightBatch) -> list[EngineStep]:
        """Return the steps of a micro-batch: the newest token, or the parts of a prompt, of each.

        The last parts of all prompts are in one step, so that the answers begin together.
        """
        if batch.phase is Phase.DECODE:
            drafts = self._drafts(batch) if self.drafts.is_on else {}
            chunks = [
                self._chunk(sequence, self._first(sequence), drafts.get(sequence.request, 0))
                for sequence in batch.sequences
            ]
            return [self._step(batch.phase, chunks)]
        # Each position with a score is a row of the step, as is each other sequence.
        scored = max(1, self._scored_tokens // len(batch.sequences))
        parts = [self._parts_of(sequence, scored) for sequence in batch.sequences]
        most = max(map(len, parts))
        return [
            self._step(
                batch.phase, [own[place - most] for own in parts if place >= most - len(own)]
            )
            for place in range(most)
        ]

    def _step(self, phase: Phase, chunks: Sequence[ScheduledChunk]) -> EngineStep:
        number, self.next_number = self.next_number, self.next_number + 1
        return EngineStep(number, tuple(chunks), drafts=self.drafts.take_works(), phase=phase)

    def _parts_of(self, sequence: ReadySequence, scored: int) -> list[ScheduledChunk]:
        """Return the parts of a prompt, as even as they can be; with scores, of few tokens."""
        found = self._requests[sequence.request]
        scores, cached = found.request.scores_prompt, found.cached
        tokens = sequence.context_tokens - cached
        count = -(-tokens // min(self._part_tokens, scored if scores else sys.maxsize))
        ends = [cached + tokens * (place + 1) // count for place in range(count)]
        return [
            self._chunk(sequence, first, end=end)
            for first, end in zip([cached, *ends], ends, strict=False)
        ]

    def _first(self, sequence: ReadySequence) -> int:
        """Return the first token of a decode step, which has the newest one, not in the cache yet.

        Where the rotary angles of all keys change with it, all are computed again.
        """
        if self._switches(sequence):
            return 0
        found = self._requests.get(sequence.request)
        return sequence.context_tokens - 1 - (0 if found is None else found.repeated)

    def _drafts(self, batch: InFlightBatch) -> dict[int, int]:
        """Return the draft tokens of the sequences of a decode micro-batch."""
        rows = len(batch.sequences)
        known = [self._requests.get(sequence.request) for sequence in batch.sequences]
        tokens = rows + sum(one.repeated for one in known if one is not None)
        left_slots = len(self._draft_slots) if self._limits.num_state_slots else rows
        candidates = []
        for sequence in batch.sequences:
            if sequence.is_finished or self._switches(sequence):
                continue
            found = self._requests[sequence.request]
            left = found.request.max_tokens - sequence.new_tokens - 1
            left = min(left, self._limits.tokens_before_switch(sequence.context_tokens))
            candidates.append(
                DraftCandidate(sequence.request, sequence.context_tokens, left, found.credit)
            )
        counts: dict[int, int] = {}
        room = MAX_STEP_TOKENS - tokens
        longest, cost = self.drafts.longest(candidates, tokens, rows)
        for one in candidates:
            most = min(longest[one.request], one.left, room) if left_slots else 0
            counts[one.request] = self.drafts.draft(one, most, cost)
            room -= counts[one.request]
            left_slots -= counts[one.request] > 0
        return counts

    def _switches(self, sequence: ReadySequence) -> bool:
        """Whether the rotary angles of all keys change with the newest token of a sequence."""
        return sequence.context_tokens - 1 == self._limits.switches_after

    def _chunk(
        self, sequence: ReadySequence, first: int, drafts: int = 0, end: int | None = None
    ) -> ScheduledChunk:
        """Return the tokens from ``first`` to ``end``, the newest one by default, and drafts."""
        context, table = sequence.context_tokens, self._tables[sequence.slot]
        end = (context if end is None else end) + drafts
        if sequence.is_finished:  # its token is no input of any other, and overwrites no prompt
            first = max(first, context - sequence.new_tokens)
            first = min(first, len(table) * self._limits.block_size - 1)
            end = first + 1
        num_blocks = self._limits.blocks_for(end)
        found = self._requests.get(sequence.request)
        has_draft_slot = drafts > 0 and self._limits.num_state_slots > 0
        return ScheduledChunk(
            sequence.request,
            first,
            end - first,
            tuple(table[:num_blocks]),
            end >= context and not sequence.is_finished,
            drafts,
            self._window_blocks(sequence.slot, num_blocks),
            0 if found is None else found.origin,
            self._state_slots[sequence.slot],
            draft_slot=self._draft_slots.pop() if has_draft_slot else -1,
        )

    def _window_blocks(self, slot: int, count: int) -> tuple[int, ...]:
        """Return the first blocks of a sequence in layers with windows.

        There are fewer, which are used in turn: the window before a chunk, and the chunk, have one
        each.
        """
        width = self._slot_window_blocks
        if not width:
            return ()
        own = [one * width + place for one in self._slots_of[slot] for place in range(width)]
        return tuple(islice(cycle(own), count))


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineDepth:
    """Limits of the micro-batches in flight, from the number of stages.

    Attributes:
        prefill_stages, decode_stages: stages of each phase, the master's included.
        is_split: whether each phase has stages of its own; otherwise both numbers are equal, and
            micro-batches of both phases follow each other through the same stages.
    """

    prefill_stages: int
    decode_stages: int
    is_split: bool = False

    def max_in_flight(self, phase: Phase) -> int:
        """Return how many micro-batches of a phase may be in flight: one a stage and one more.

        More would only wait in queues; a master without other stages computes one at a time.
        """
        stages = self.prefill_stages if phase is Phase.PREFILL else self.decode_stages
        return 1 if stages == 1 else stages + 1

    def is_local(self, phase: Phase) -> bool:
        """Whether the master alone computes a phase."""
        return self.max_in_flight(phase) == 1

    def open_phases(self, in_flight: Sequence[Phase | None]) -> tuple[Phase, ...]:
        """Return the phases of which the pipeline can take a step beside those in flight."""
        if not self.is_split:
            return BOTH_PHASES if len(in_flight) < self.max_in_flight(Phase.DECODE) else ()
        counts = Counter(in_flight)
        return tuple(phase for phase in Phase if counts[phase] < self.max_in_flight(phase))


def uniform_depth(num_stages: int) -> PipelineDepth:
    """Return the limits of stages that compute both phases."""
    return PipelineDepth(prefill_stages=num_stages, decode_stages=num_stages)
