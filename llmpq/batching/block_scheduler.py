"""Scheduler of an engine of packed steps over paged KV memory, shared by runtime and simulator.

A step is a list of chunks: one token of a sequence that decodes, or the next tokens of a prompt.
Every step has a token budget. Running sequences come first; the rest of the budget goes to waiting
requests in the order of a :class:`~llmpq.batching.queue_order.QueueOrder`. A request is admitted
when the blocks of its whole prompt are free; the first one that does not fit ends admission. The
answers of one request take turns with other requests, and all but its first leave a share of the
sequences and blocks to others. When a
running sequence needs a block and none is free, the sequence admitted last is preempted: it
releases its blocks, keeps its tokens, returns to the head of the queue and is recomputed (vLLM).
So is a sequence whose next token changes the rotary angles of all its keys (``longrope``).

Layers with windows may have blocks of their own, of which a sequence holds those that it still
reads (``WindowBlocks``); where they run out, sequences are preempted likewise.

A pipeline has several steps in flight; a sequence is in at most one of them. The steps must be
computed in the order of their numbers: a block may be found by its content from the next step on.

Content of blocks that are allocated again may be kept in host memory and on disk
(``OffloadedBlocks``). While a step is scheduled, ``copy_blocks`` copies it before the step runs;
what cannot be read from disk is computed.

With speculative decoding, a sequence that decodes may have draft tokens after its next one. They
take what is left of the budget after everything else, and free blocks only while no request waits.
How many are worth their time depends on the seconds of the steps before, from the caller's clock.
The blocks of rejected draft tokens stay with their sequence, for its next tokens. In layers with a
recurrent state the drafts have a slot of their own: where all are accepted, the sequence goes on in
it; else it goes back to the state before them, and the next step computes the accepted ones again.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from llmpq.batching.blocks import (
    BlockAllocator,
    BlockCopy,
    BlockKey,
    OffloadedBlocks,
    StateSlots,
    Tier,
    keys_of,
    root_key,
)
from llmpq.batching.engine_step import (
    NO_TOKENS,
    DraftCandidate,
    EngineLimits,
    EngineRequest,
    EngineSequence,
    EngineStep,
    Propose,
    ScheduledChunk,
    StepInFlight,
)
from llmpq.batching.queue_order import FairTurns, QueueOrder, QueueState
from llmpq.batching.speculation import MAX_STEP_TOKENS
from llmpq.errors import LlmpqError

SAVED_EVERY_BLOCKS = 64
"""A state is saved after so many blocks of a long prompt, besides the last one before its end."""
RESERVED_SHARE = 8
"""One of so many sequences and blocks is not for further answers of a request that runs."""
FURTHER_STARTS = 2
"""Further answers of requests that start in a step, while there are other requests."""
SCORED_SHARE = 32
"""One of so many tokens of a step may be of prompts with a score at every position, while there are
other requests: each of these tokens passes the head and has its log-probabilities sorted.

Both are in one of the steps in flight at most: in a pipeline, the next token of the other requests
would wait for all of them."""
REMEMBERED_STEPS = 64
"""Steps after the last other request that keep to both: the next one would wait for all large steps
in flight."""
CopyBlocks = Callable[[Sequence[BlockCopy]], Collection[int]]
"""Copies blocks on all stages, in order; returns the places in the list that could not be read."""

OFFLOAD_TIERS: tuple[Tier, ...] = ("host", "disk")


class OffloadCounts(NamedTuple):
    """Copies of blocks in a tier.

    Attributes:
        held: blocks there now, and those of layers with windows.
        num_saved, num_loaded: blocks of both kinds copied to and from it so far.
    """

    held: tuple[int, int]
    num_saved: int
    num_loaded: int


class BlockScheduler:
    """Decides the steps of one engine.

    Args:
        limits: of the engine.
        order: of the waiting queue.
        propose: finds the draft tokens of a sequence that decodes, while a step is scheduled;
            ``None`` for no speculative decoding, and with a draft model.

    Attributes:
        copy_blocks: may be set later; ``None`` copies nothing, in a simulation.
    """

    def __init__(
        self, limits: EngineLimits, order: QueueOrder, propose: Propose | None = None
    ) -> None:
        self._limits = limits
        self._order = order
        self.copy_blocks: CopyBlocks | None = None
        self._copies: list[BlockCopy] = []  # not made yet
        sizes = zip(OFFLOAD_TIERS, limits.offload.sizes, strict=True)
        self._offloaded = [OffloadedBlocks([*sizes], self._copies, has_window=False)]
        self._allocator = BlockAllocator(limits.num_blocks, self._offloaded[0])
        self._windows: WindowBlocks | None = None
        if limits.window_tokens is not None:
            sizes = zip(OFFLOAD_TIERS, limits.offload.window_sizes, strict=True)
            self._offloaded.append(OffloadedBlocks([*sizes], self._copies, has_window=True))
            self._windows = WindowBlocks(limits, self._offloaded[1])
        self._chunk_tokens = limits.chunk_tokens
        self._watermark = int(limits.watermark * limits.num_blocks)
        self._sequences: dict[int, EngineSequence] = {}
        self._waiting: dict[int, EngineRequest] = {}  # never admitted, in order of arrival
        self._turns = FairTurns()
        self._preempted: deque[EngineSequence] = deque()  # admitted before all others
        self._running: dict[int, EngineSequence] = {}  # in order of admission
        self._slots = StateSlots(limits.num_state_slots or limits.max_sequences)
        self._in_flight: dict[int, StepInFlight] = {}
        self._num_scored = 0  # unfinished requests with a score at every position of the prompt
        # Tokens of their prompts that the next step may still take, further answers that may start.
        self._scored_left = self._further_left = 0
        # The first steps that may be of such prompts alone, and of one request alone.
        self._shared_before = self._mixed_before = 0
        self._scored_step = self._further_step = -1  # the last one with either
        self.drafts = limits.new_drafts(propose)
        self._next_step = 0
        self._newly_preempted: list[int] = []  # not yet reported by a step
        self._num_arrived = self._arrived_tokens = self._waiting_tokens = 0
        self._prefill_s, self._prefill_tokens = 0.0, 0  # of the steps with prompts
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        """Prompt tokens of admitted requests."""
        self.prefix_cache_hits = 0
        """Those of them whose keys and values were found."""
        self.tier_hits: dict[Tier, int] = {"blocks": 0, "host": 0, "disk": 0}
        """These by where they were found."""
        self.num_unread = 0
        """Blocks that could not be read from disk."""
        self.wake_s = math.inf

    @property
    def _saves_states(self) -> bool:
        return self._limits.prefix_caching and self._limits.num_state_slots > 0

    @property
    def _most_known(self) -> int:
        """Most known tokens of a sequence that decodes in a step: accepted ones may be repeated."""
        has_states = self._limits.num_state_slots > 0
        return 1 + (self._limits.num_speculative_tokens if has_states else 0)

    @property
    def num_waiting(self) -> int:
        """Requests without blocks."""
        return len(self._waiting) + len(self._preempted)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def num_in_flight(self) -> int:
        """Steps that are not complete."""
        return len(self._in_flight)

    @property
    def free_blocks(self) -> int:
        """Blocks without a user."""
        return self._allocator.num_free

    @property
    def free_window_blocks(self) -> int:
        """Blocks without a user in layers with windows, where these have blocks of their own."""
        return 0 if self._windows is None else self._windows.num_free

    def restore(self, stored: Sequence[tuple[bool, BlockKey, int]]) -> None:
        """Find blocks in files that the engine before has left.

        Args:
            stored: whether of layers with windows, key and place of each, the oldest first.
        """
        for own, one in enumerate(self._offloaded):
            one.restore("disk", [(key, place) for window, key, place in stored if window == own])

    def offloaded(self, tier: Tier) -> OffloadCounts:
        """Return what is kept of blocks that were allocated again."""
        held = [one.count(tier) for one in self._offloaded]
        return OffloadCounts(
            (held[0], sum(held[1:])),
            sum(one.num_saved[tier] for one in self._offloaded),
            sum(one.num_loaded[tier] for one in self._offloaded),
        )

    @property
    def queued_tokens(self) -> int:
        """Tokens to compute before every request has its next token; running prompts included."""
        running = sum(max(0, item.tokens - item.computed - 1) for item in self._running.values())
        return self.waiting_tokens + running

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the requests without blocks."""
        return self._waiting_tokens + sum(sequence.tokens for sequence in self._preempted)

    @property
    def started_tokens(self) -> int:
        """Prompt tokens of the running sequences that have no token of their answer."""
        running = self._running.values()
        return sum(one.tokens for one in running if one.tokens == one.request.prompt_tokens)

    @property
    def is_idle(self) -> bool:
        """Whether no request is unfinished."""
        return not self._sequences

    def add(self, request: EngineRequest) -> None:
        """Put a request at the end of the queue.

        Raises:
            CapacityError: its prompt and longest answer do not fit into all blocks.
            LlmpqError: an unfinished request has the same number.
        """
        if request.request in self._sequences:
            raise LlmpqError(f"engine scheduler: request {request.request} is not finished")
        self._limits.needed_blocks(request, self._limits.num_blocks)
        ids = None if request.token_ids is None else list(request.token_ids)
        sequence = EngineSequence(
            request=request,
            tokens=request.prompt_tokens,
            ids=ids,
            credit=self.drafts.first_credit(),
            turn=self._turns.add(request.group),
        )
        self._add_keys(sequence, request.prompt_tokens)
        self._sequences[request.request] = sequence
        self._waiting[request.request] = request
        self._num_arrived += 1
        self._arrived_tokens += request.prompt_tokens
        self._waiting_tokens += request.prompt_tokens
        self._num_scored += request.scores_prompt

    def abort(self, request: int) -> bool:
        """Remove a request; its blocks are released when its step in flight is complete.

        Returns:
            Whether the request was unfinished.
        """
        sequence = self._sequences.get(request)
        if sequence is None or sequence.is_aborted:
            return False
        sequence.is_aborted = True
        if sequence.in_step is not None:
            return True
        if request in self._waiting:
            self._leave_queue(sequence)
        elif request not in self._running:
            self._preempted.remove(sequence)
        self._remove(sequence)
        return True

    def schedule(self, now_s: float) -> EngineStep | None:
        """Return the next step, or ``None`` if nothing can run before a step completes.

        Args:
            now_s: time on the clock of the arrivals.
        """
        limits = self._limits
        if len(self._in_flight) == limits.steps_in_flight:
            return None
        before = self.num_preemptions
        if len(self._sequences) > self._num_scored:
            self._shared_before = self._next_step + REMEMBERED_STEPS
        has_others = self._next_step < self._shared_before
        self._scored_left = budget = limits.token_budget
        if has_others:
            is_free = self._scored_step not in self._in_flight
            self._scored_left = max(1, budget // SCORED_SHARE) if is_free else 0
        self._further_left = FURTHER_STARTS if self._further_step not in self._in_flight else 0
        chunks, left = self._continue()
        if self.num_preemptions == before:
            chunks += self._admit(left, now_s)
        if self.drafts.is_on and chunks:
            self._add_drafts(chunks)
        self._make_copies()
        if not chunks:
            return None
        works, preempted = self.drafts.take_works(), tuple(self._newly_preempted)
        step = EngineStep(self._next_step, tuple(chunks), preempted, works)
        self._newly_preempted.clear()
        self._cache_filled_blocks(chunks)
        if self._saves_states:
            step = replace(step, chunks=tuple(map(self._with_saved_state, chunks)))
        self._in_flight[step.number] = StepInFlight(now_s, step.chunks)
        self._next_step += 1
        return step

    def complete_drafts(self, step: EngineStep, now_s: float, *, has_ended: bool = False) -> None:
        """Take the time at which the draft model has computed the drafts of a new step, or ended.

        Later steps have no drafts once it has ended.
        """
        seconds = now_s - self._in_flight[step.number].start_s
        self._in_flight[step.number] = StepInFlight(now_s, step.chunks)
        self.drafts.measure_works(step.drafts, step.rows, seconds, has_ended=has_ended)

    def complete(
        self,
        number: int,
        tokens: Mapping[int, int],
        finished: Collection[int] = (),
        accepted: Mapping[int, Sequence[int]] = NO_TOKENS,
        *,
        now_s: float | None = None,
    ) -> None:
        """Complete a step in flight.

        Args: as in :class:`StepScheduler`.

        Raises:
            LlmpqError: the step is not in flight, a token is missing, or an unfinished request has
                its ``max_tokens``.
        """
        step = self._in_flight.pop(number, None)
        if step is None:
            raise LlmpqError(f"engine scheduler: step {number} is not in flight")
        if now_s is not None:
            self._measure(step, now_s)
        for chunk in step.chunks:
            sequence = self._sequences[chunk.request]
            sequence.in_step = None
            if chunk.makes_token and self.drafts.is_on and not sequence.is_aborted:
                right = accepted.get(chunk.request, ())
                self._verify(sequence, chunk, right, len(step.chunks))
            if sequence.is_aborted or (chunk.makes_token and chunk.request in finished):
                self._remove(sequence)
            elif chunk.makes_token:
                self._append(sequence, tokens)

    def _measure(self, step: StepInFlight, now_s: float) -> None:
        """Take the times of a step; one with prompts says nothing of a row."""
        is_decode = all(map(self._decodes, step.chunks))
        tokens = sum(chunk.count for chunk in step.chunks)
        rows = tokens if is_decode else None
        seconds = self.drafts.measure_step(step.start_s, now_s, rows)
        if not is_decode:
            self._prefill_s += max(0.0, seconds)
            self._prefill_tokens += tokens

    def _decodes(self, chunk: ScheduledChunk) -> bool:
        """Return whether a chunk is that of a sequence that decodes, and no part of a prompt."""
        known = chunk.count - chunk.num_draft_tokens
        if known == 1:
            return chunk.makes_token
        sequence = self._sequences[chunk.request]
        has_answer = sequence.tokens > sequence.request.prompt_tokens
        return chunk.makes_token and has_answer and known <= self._most_known

    def _verify(
        self, sequence: EngineSequence, chunk: ScheduledChunk, accepted: Sequence[int], rows: int
    ) -> None:
        """Keep the accepted draft tokens and forget the others."""
        proposed = chunk.num_draft_tokens
        goes_back = chunk.draft_slot >= 0 and len(accepted) < proposed
        self.drafts.verify(
            chunk.request, sequence.credit, len(accepted), proposed, rows, is_repeated=goes_back
        )
        if not proposed:
            return
        known = sequence.computed - proposed
        sequence.tokens += len(accepted)
        sequence.computed = known if goes_back else known + len(accepted)
        if sequence.ids is not None:
            sequence.ids += accepted
        if chunk.draft_slot >= 0:
            self._slots.free(chunk.draft_slot if goes_back else chunk.slot)
            sequence.slot = chunk.slot if goes_back else chunk.draft_slot
            sequence.draft_slot = -1
        self._cache_blocks(sequence, known, sequence.computed)

    def _append(self, sequence: EngineSequence, tokens: Mapping[int, int]) -> None:
        request = sequence.request
        if request.request not in tokens:
            raise LlmpqError(f"engine scheduler: found no token of request {request.request}")
        sequence.tokens += 1
        if sequence.tokens >= request.prompt_tokens + request.max_tokens:
            raise LlmpqError(
                f"engine scheduler: request {request.request} has its {request.max_tokens} tokens, "
                "expected to be finished"
            )
        if sequence.ids is not None:
            sequence.ids.append(tokens[request.request])
        if sequence.tokens - 1 == self._limits.switches_after:
            self._preempt(sequence)
            sequence.keys.clear()
            self._add_keys(sequence, sequence.tokens)

    def _remove(self, sequence: EngineSequence) -> None:
        number = sequence.request.request
        self._stop_running(sequence)
        if self._turns.num_requests > 1:
            self._mixed_before = self._next_step + REMEMBERED_STEPS
        self._turns.remove(sequence.request.group)
        self._free(sequence)
        self.drafts.forget(number)
        self._num_scored -= sequence.request.scores_prompt
        del self._sequences[number]

    def _free(self, sequence: EngineSequence) -> None:
        self._allocator.free(sequence.blocks)
        for slot in (sequence.slot, sequence.draft_slot):
            if slot >= 0:
                self._slots.free(slot)
        sequence.slot = sequence.from_slot = sequence.draft_slot = -1
        if self._windows is not None:
            self._windows.release(sequence)

    def _stop_running(self, sequence: EngineSequence) -> None:
        if self._running.pop(sequence.request.request, None) is not None:
            self._turns.stop(sequence.request.group)

    def _leave_queue(self, sequence: EngineSequence) -> None:
        del self._waiting[sequence.request.request]
        self._waiting_tokens -= sequence.request.prompt_tokens

    def _continue(self) -> tuple[list[ScheduledChunk], int]:
        """Return chunks of running sequences, and the tokens that are left of the budget.

        Other sequences are preempted to make room for them.
        """
        chunks: list[ScheduledChunk] = []
        left = self._limits.token_budget
        # The steps of a pipeline share the running sequences evenly.
        share = -(-len(self._running) // self._limits.steps_in_flight)
        for sequence in self._ready():
            if not left or len(chunks) == share:
                break
            if not sequence.blocks:
                continue  # preempted in this step
            count = self._next_tokens(sequence, left)
            if count and self._make_room(sequence, sequence.computed + count):
                chunks.append(self._advance(sequence, count))
                left -= count
        return chunks, left

    def _ready(self) -> list[EngineSequence]:
        """Return the running sequences that are in no step, the one that waits longest first."""
        ready = [item for item in self._running.values() if item.in_step is None]
        if self._limits.steps_in_flight > 1:
            ready.sort(key=lambda item: item.last_step)
        return ready

    def _make_room(self, sequence: EngineSequence, tokens: int) -> bool:
        """Allocate blocks for a number of tokens; return whether that was possible."""
        missing = self._limits.blocks_for(tokens) - len(sequence.blocks)
        if missing > 0:
            while missing > self._allocator.num_free:
                if not self._preempt_for(sequence):
                    return False
            sequence.blocks += self._allocator.allocate(missing)
            sequence.table = tuple(sequence.blocks)
        if self._windows is not None:
            while not self._windows.advance(sequence, sequence.computed, tokens):
                if not self._preempt_for(sequence):
                    return False
        return True

    def _preempt_for(self, sequence: EngineSequence) -> bool:
        """Preempt the sequence admitted last; return whether ``sequence`` goes on after it."""
        victim = next(item for item in reversed(self._running.values()) if item.in_step is None)
        if victim is sequence and self._in_flight:
            return False  # a step in flight may end sequences
        self._preempt(victim)
        return victim is not sequence

    def _preempt(self, sequence: EngineSequence) -> None:
        self._newly_preempted.append(sequence.request.request)
        self.num_preemptions += 1
        self._to_head_of_queue(sequence)

    def _to_head_of_queue(self, sequence: EngineSequence) -> None:
        self._stop_running(sequence)
        self._free(sequence)
        sequence.blocks, sequence.table, sequence.computed = [], (), 0
        self._preempted.appendleft(sequence)

    def _admit(self, left: int, now_s: float) -> list[ScheduledChunk]:
        """Start waiting requests in order, until one does not fit."""
        chunks: list[ScheduledChunk] = []
        for sequence in self._in_order(now_s):
            if len(self._running) == self._limits.max_sequences or not left:
                break
            is_further = not sequence.was_admitted and self._turns.is_further(
                sequence.request.group
            )
            if not self._has_share(sequence, left, is_further=is_further):
                if sequence.was_admitted:
                    break  # preempted sequences start in order
                continue  # others may pass it
            if not self._start(sequence, is_further=is_further):
                break
            self._count_start(is_further=is_further)
            count = self._next_tokens(sequence, left)
            if self._windows is not None:
                has_room = self._windows.advance(
                    sequence, sequence.computed, sequence.computed + count
                )
                assert has_room, "its blocks were free"
            chunks.append(self._advance(sequence, count))
            left -= count
        for chunk in chunks:
            if chunk.request in self._waiting:
                self._leave_queue(self._sequences[chunk.request])
        while self._preempted and self._preempted[0].blocks:
            self._preempted.popleft()
        return chunks

    def _count_start(self, *, is_further: bool) -> None:
        if is_further:
            self._further_left = max(0, self._further_left - 1)
            self._further_step = self._next_step

    def _in_order(self, now_s: float) -> Iterator[EngineSequence]:
        """Yield the queue, preempted sequences first."""
        yield from self._preempted
        if not self._waiting or (self._running and self.free_blocks <= self._watermark):
            return
        mean = self._arrived_tokens / self._num_arrived
        prefill_s = mean * self._prefill_s / max(1, self._prefill_tokens)
        waiting: Collection[EngineRequest] = self._waiting.values()
        if self._turns.is_needed:
            waiting = sorted(waiting, key=lambda item: self._sequences[item.request].turn)
        for request in self._order(waiting, QueueState(now_s, mean, prefill_s)):
            yield self._sequences[request.request]

    def _has_share(self, sequence: EngineSequence, left: int, *, is_further: bool) -> bool:
        """Return whether this step may still start a sequence of this kind."""
        if is_further and not self._further_left:
            has_others = self._turns.num_requests > 1
            if has_others or self._next_step < self._mixed_before:
                return False
        return self._next_tokens(sequence, left) > 0

    def _start(self, sequence: EngineSequence, *, is_further: bool) -> bool:
        """Allocate the blocks of a waiting sequence; return whether they were free."""
        request, limits = sequence.request, self._limits
        most = limits.max_sequences - limits.max_sequences // RESERVED_SHARE
        if not self._slots.num_free or (is_further and len(self._running) >= most):
            return False
        tokens = sequence.tokens
        if self._order.reserves_answer:
            tokens = request.prompt_tokens + request.max_tokens - 1
        share = limits.num_blocks // RESERVED_SHARE if is_further else 0
        reserve = max(share, self._watermark) if self._running else 0
        found: Counter[Tier | None] = Counter()
        is_loaded = False
        while not is_loaded:
            prefix = self._prefix(sequence)
            if self._windows is not None and not self._has_window_blocks(tokens):
                return False
            missing = limits.blocks_for(tokens) - len(prefix)
            if missing + self._allocator.count_taken(prefix) > self.free_blocks - reserve:
                return False
            found = Counter(map(self._allocator.tier_of, prefix))
            is_loaded = self._take_blocks(sequence, missing, prefix)
        if not sequence.was_admitted:
            sequence.was_admitted = True
            self.prefix_cache_queries += sequence.tokens
            self.prefix_cache_hits += sequence.computed
            for tier in self.tier_hits:
                self.tier_hits[tier] += found[tier] * limits.block_size
        if self._saves_states and sequence.computed:
            last = sequence.computed // limits.block_size - 1
            sequence.from_slot = self._slots.find(sequence.keys[last])
        sequence.slot = self._slots.allocate()
        self._running[request.request] = sequence
        self._turns.start(request.group, sequence.turn)
        return True

    def _prefix(self, sequence: EngineSequence) -> Sequence[BlockKey]:
        """Return the keys of a waiting sequence's longest prefix that is cached."""
        if not self._limits.prefix_caching or sequence.request.scores_prompt:
            return ()
        # The last token is always computed, because its output is needed.
        most = (sequence.tokens - 1) // self._limits.block_size
        prefix = self._allocator.find(sequence.keys[:most])
        if self._saves_states:
            prefix = self._prefix_with_state(prefix)
        while self._windows is not None:
            kept = prefix[: self._windows.longest_prefix(prefix)]
            if len(kept) == len(prefix):
                break
            prefix = self._prefix_with_state(kept) if self._saves_states else kept
        return prefix

    def _prefix_with_state(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Return the longest prefix of ``keys`` at whose end the state is saved."""
        for count in range(len(keys), 0, -1):
            if self._slots.has(keys[count - 1]):
                return keys[:count]
        return ()

    def _take_blocks(
        self, sequence: EngineSequence, count: int, prefix: Sequence[BlockKey]
    ) -> bool:
        """Give a sequence the blocks of a prefix and further ones.

        Returns:
            Whether the whole prefix could be read; otherwise the sequence has no blocks, and what
            could not be read is not cached any more.
        """
        sequence.blocks = self._allocator.allocate(count, prefix)
        sequence.table = tuple(sequence.blocks)
        sequence.computed = len(prefix) * self._limits.block_size
        if self._windows is not None:
            self._windows.start(sequence, prefix)
        if not any(copy.source == "disk" for copy in self._copies):
            return True  # memory is always read
        unread = self._make_copies()
        for copy in unread:
            if copy.has_window:
                assert self._windows is not None
                self._windows.forget(copy.key)
            else:
                self._allocator.forget(copy.key)
        if unread:
            self._free(sequence)
            sequence.blocks, sequence.table, sequence.computed = [], (), 0
        return not unread

    def _make_copies(self) -> list[BlockCopy]:
        """Copy what is to be copied before the next step; return what could not be read."""
        copies = tuple(self._copies)
        self._copies.clear()
        if not copies or self.copy_blocks is None:
            return []
        unread = [copies[place] for place in self.copy_blocks(copies)]
        self.num_unread += len(unread)
        return unread

    def _has_window_blocks(self, tokens: int) -> bool:
        """Return whether a sequence that grows to ``tokens`` finds blocks for its windows."""
        limits = self._limits
        free = self.free_window_blocks
        if self._order.reserves_answer:  # those that the running sequences will hold
            requests = (sequence.request for sequence in self._running.values())
            free = limits.num_window_blocks - sum(
                limits.window_blocks_for(one.prompt_tokens + one.max_tokens - 1) for one in requests
            )
        return limits.window_blocks_for(tokens) <= free

    def _next_tokens(self, sequence: EngineSequence, left: int) -> int:
        """Return how many tokens of a sequence the next step can take, of ``left`` in all."""
        missing = sequence.tokens - sequence.computed
        if sequence.request.scores_prompt and missing > 1:
            left = min(left, self._scored_left)
        # A chunk ends where a state is saved, unless it repeats accepted draft tokens.
        has_answer = sequence.tokens > sequence.request.prompt_tokens
        is_repeated = has_answer and 1 < missing <= self._most_known
        if self._saves_states and not is_repeated:
            size, done = self._limits.block_size, sequence.computed
            many = SAVED_EVERY_BLOCKS * size
            for end in ((sequence.tokens - 1) // size * size, (done // many + 1) * many):
                if end > done:
                    left = min(left, end - done)
        return min(missing, left, self._chunk_tokens)

    def _advance(self, sequence: EngineSequence, count: int) -> ScheduledChunk:
        if sequence.request.scores_prompt and sequence.tokens - sequence.computed > 1:
            self._scored_left -= count
            self._scored_step = self._next_step
        first, end = sequence.computed, sequence.computed + count
        sequence.computed = end
        sequence.in_step = sequence.last_step = self._next_step
        makes_token = end == sequence.tokens
        from_slot, sequence.from_slot = sequence.from_slot, -1
        return ScheduledChunk(
            sequence.request.request,
            first,
            count,
            sequence.table,
            makes_token,
            window_blocks=sequence.window_table,
            slot=sequence.slot,
            from_slot=from_slot,
        )

    def _add_drafts(self, chunks: list[ScheduledChunk]) -> None:
        """Add draft tokens to the chunks of sequences that decode."""
        limits, size = self._limits, self._limits.block_size
        tokens = sum(chunk.count for chunk in chunks)
        left = min(limits.token_budget, MAX_STEP_TOKENS) - tokens
        decoding = {
            place: self._sequences[chunk.request]
            for place, chunk in enumerate(chunks)
            if self._decodes(chunk)
        }
        if left <= 0 or not decoding:
            return
        candidates = {
            place: DraftCandidate(
                one.request.request, one.tokens, one.most_draft_tokens, one.credit
            )
            for place, one in decoding.items()
        }
        longest, cost = self.drafts.longest([*candidates.values()], tokens, len(chunks))
        for place, sequence in decoding.items():
            free = len(sequence.table) * size - sequence.tokens
            if not self.num_waiting:
                free += size * max(0, self.free_blocks - self._watermark)
            if self._windows is not None:
                free = min(free, self._windows.most_more(sequence))
            one = candidates[place]
            most = min(longest[one.request], one.left, left, free)
            most = min(most, limits.tokens_before_switch(sequence.tokens))
            if limits.num_state_slots and not self._slots.num_free:
                most = 0
            count = self.drafts.draft(one, most, cost)
            if count:
                chunks[place] = self._with_drafts(sequence, chunks[place], count)
                left -= count

    def _with_drafts(
        self, sequence: EngineSequence, chunk: ScheduledChunk, count: int
    ) -> ScheduledChunk:
        sequence.computed += count
        missing = self._limits.blocks_for(sequence.computed) - len(sequence.blocks)
        if missing > 0:
            sequence.blocks += self._allocator.allocate(missing)
            sequence.table = tuple(sequence.blocks)
        if self._windows is not None:
            has_room = self._windows.advance(sequence, chunk.first, sequence.computed)
            assert has_room, "so many blocks were free"
        if self._limits.num_state_slots:
            sequence.draft_slot = self._slots.allocate()
        return replace(
            chunk,
            count=chunk.count + count,
            blocks=sequence.table,
            num_draft_tokens=count,
            window_blocks=sequence.window_table,
            draft_slot=sequence.draft_slot,
        )

    def _cache_filled_blocks(self, chunks: list[ScheduledChunk]) -> None:
        """Let the next steps find the blocks that this step fills with tokens that are known."""
        size = self._limits.block_size
        for chunk in chunks:
            end = chunk.first + chunk.count - chunk.num_draft_tokens
            if end // size > chunk.first // size:
                self._cache_blocks(self._sequences[chunk.request], chunk.first, end)

    def _with_saved_state(self, chunk: ScheduledChunk) -> ScheduledChunk:
        """Let a chunk save the state at its end, where later requests may go on from it.

        Every full block of an answer ends with a state; the newest one is kept.
        """
        sequence, size = self._sequences[chunk.request], self._limits.block_size
        count, rest = divmod(chunk.first + chunk.count - chunk.num_draft_tokens, size)
        is_last = count in {sequence.tokens // size, (sequence.tokens - 1) // size}
        is_scored = sequence.request.scores_prompt
        if rest or is_scored or not (is_last or count % SAVED_EVERY_BLOCKS == 0):
            return chunk
        key = sequence.keys[count - 1]
        if count * size > sequence.request.prompt_tokens:
            if sequence.saved is not None:
                self._slots.forget(sequence.saved)
            sequence.saved = key
        return replace(chunk, to_slot=self._slots.save(key))

    def _cache_blocks(self, sequence: EngineSequence, first: int, end: int) -> None:
        """Let the next steps find the blocks that the tokens ``[first, end)`` fill."""
        if not self._limits.prefix_caching:
            return
        size = self._limits.block_size
        self._add_keys(sequence, end)
        for index in range(first // size, end // size):
            self._allocator.cache(sequence.blocks[index], sequence.keys[index])
            if self._windows is not None:
                self._windows.cache(sequence, index, sequence.keys[index])

    def _add_keys(self, sequence: EngineSequence, tokens: int) -> None:
        """Compute the keys of the full blocks among the first tokens."""
        if not self._limits.prefix_caching:
            return
        size, keys, ids = self._limits.block_size, sequence.keys, sequence.ids
        request = sequence.request
        table = self._limits.rope_table(request.prompt_tokens, sequence.tokens)
        if ids is None:
            keys += [(request.request, table, index) for index in range(len(keys), tokens // size)]
            return
        parent = keys[-1] if keys else root_key(request.cache_salt, table)
        assert isinstance(parent, bytes)
        keys += keys_of(ids[len(keys) * size : tokens], parent, size)


class WindowBlocks:
    """Blocks of keys and values in layers with windows: a sequence holds those that it still reads.

    They are apart from the blocks of the other layers, with a table as long. A block before the
    window of all later tokens is released; it stays cached until it is allocated again. A prefix is
    found only if the window before its end is here, too.

    Args:
        limits: of the engine; ``window_tokens`` is set.
        offloaded: keeps the content of blocks that are allocated again.
    """

    def __init__(self, limits: EngineLimits, offloaded: OffloadedBlocks) -> None:
        self._limits = limits
        self._size = limits.block_size
        self._allocator = BlockAllocator(limits.num_window_blocks, offloaded)

    @property
    def num_free(self) -> int:
        """Blocks without a user."""
        return self._allocator.num_free

    def longest_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Return how many blocks of a prefix can be reused: the window before its end is cached."""
        longest = run = 0
        for place, key in enumerate(keys):
            run = run + 1 if self._allocator.tier_of(key) is not None else 0
            if run > place - self._first_seen((place + 1) * self._size):
                longest = place + 1
        return longest

    def start(self, sequence: EngineSequence, keys: Sequence[BlockKey]) -> None:
        """Let a sequence hold the window before the end of a prefix that was found."""
        first = self._first_seen(len(keys) * self._size)
        sequence.window_blocks = [0] * first + self._allocator.allocate(0, keys[first:])
        sequence.window_first = first
        sequence.window_table = tuple(sequence.window_blocks)

    def advance(self, sequence: EngineSequence, first: int, end: int) -> bool:
        """Move on to the tokens ``[first, end)``: release what they do not read, allocate the rest.

        Returns:
            Whether enough blocks were free.
        """
        kept = min(self._first_seen(first), len(sequence.window_blocks))
        if kept > sequence.window_first:
            self._allocator.free(sequence.window_blocks[sequence.window_first : kept])
            sequence.window_first = kept
        missing = self._limits.blocks_for(end) - len(sequence.window_blocks)
        if missing > self.num_free:
            return False
        if missing > 0:
            sequence.window_blocks += self._allocator.allocate(missing)
            sequence.window_table = tuple(sequence.window_blocks)
        return True

    def most_more(self, sequence: EngineSequence) -> int:
        """Return the tokens that a sequence can grow by with the free blocks."""
        blocks = len(sequence.window_blocks) + self.num_free
        return blocks * self._size - sequence.tokens

    def cache(self, sequence: EngineSequence, place: int, key: BlockKey) -> None:
        """Record the content of the full block ``place`` of a sequence, if it holds it."""
        if place >= sequence.window_first:
            self._allocator.cache(sequence.window_blocks[place], key)

    def forget(self, key: BlockKey) -> None:
        """Forget content in use that could not be loaded."""
        self._allocator.forget(key)

    def release(self, sequence: EngineSequence) -> None:
        """Release all blocks of a sequence."""
        self._allocator.free(sequence.window_blocks[sequence.window_first :])
        sequence.window_blocks, sequence.window_table, sequence.window_first = [], (), 0

    def _first_seen(self, position: int) -> int:
        """Return the first block that a token at ``position`` or later reads."""
        window = self._limits.window_tokens
        assert window is not None
        return max(0, position - window + 1) // self._size
