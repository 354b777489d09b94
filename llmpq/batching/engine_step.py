"""Steps of an engine: its limits, requests, chunks and draft tokens; the interface of a scheduler.

A ``BlockScheduler`` mixes decode rows and prompt chunks over KV blocks that sequences take as they
grow; a ``PolicyScheduler`` obeys a batching policy over slots. Both have a ``StepDrafts``, which
decides which sequences of a step have how many draft tokens.

A draft model (Leviathan et al. 2023; ``draft_model`` in vLLM) is a small model that shares the
vocabulary. Before a step it computes the tokens that it does not know yet, then one draft token
after the other, for all sequences with drafts together: as many passes as the longest draft has
tokens. It has KV blocks of its own. They stay with a sequence until it ends; where none is free,
the sequence that had no draft for the longest time loses its blocks.

A model's own layer for multi-token prediction (DeepSeek-AI 2024, Sec. 2.2; ``mtp`` in vLLM) is a
draft model that reads the hidden states of the steps. Its keys and values lie in the blocks of
the sequence, and it begins with a sequence at no cost.

All sequences of a step wait for these passes. So a pass is made where the tokens that it may save
are worth it: for ``n`` sequences, ``m`` of which have a draft of ``k`` tokens or more, the ``k``-th
pass takes ``n`` times its share of a step, and saves ``a^k`` steps of each of the ``m``, where
``a`` is the share of the sequence's draft tokens that was accepted so far. Beside the
``DraftCredit`` of each sequence, an account of all sequences bounds what drafts lose in steps:
while it is empty there are none.

To begin with a sequence, the draft model computes its prompt. It begins where this takes less time
than drafts of the longest answer would save, by the share of all draft tokens that was accepted so
far; with one sequence a step, so that the first ones show whether drafts are of use.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from llmpq.batching.blocks import NOTHING_KEPT, BlockAllocator, BlockKey, OffloadLimits
from llmpq.batching.speculation import (
    CREDIT_OF_TOKEN,
    FIRST_ACCEPTED,
    FIRST_CREDIT,
    FIRST_REJECTED,
    KNOWN_STEPS,
    MAX_STEP_TOKENS,
    MOST_DISTURBED,
    ROW_COST,
    DraftCredit,
    RowCost,
)
from llmpq.errors import CapacityError, SpecError
from llmpq.spec.plan import Plan
from llmpq.spec.precision import Phase
from llmpq.spec.runtime_constants import PROMPT_CHUNK_TOKENS, kept_blocks

FIRST_MODEL_CREDIT = 1.0
"""Steps that the drafts of a sequence may lose at first: a draft token takes much of one."""
FIRST_BALANCE = 2.0
"""Steps that all drafts together may lose at first."""
MOST_BALANCE = 16.0
KEPT_DRAFTS = 0.98
"""Weight of the drafts before in the share of all draft tokens that was accepted."""
SMOOTHED_DRAFTS = 8
"""Drafts whose mean is the cost of a pass."""
FEW_TOKENS = 8
"""Most tokens of a sequence that are computed together with others; more are a prompt."""
Propose = Callable[[int, int], int]
"""Returns how many draft tokens there are for a request, at most the given number."""
NO_TOKENS: Mapping[int, Sequence[int]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Sequences and tokens that an engine computes in one step.

    Attributes:
        token_budget: tokens of all sequences in one step.
        max_sequences: running sequences.
        num_blocks: KV blocks.
        block_size: tokens of a block.
        watermark: share of the blocks that an admission leaves free while sequences run.
        prefix_caching: reuse blocks of equal content.
        steps_in_flight: steps that may be in the pipeline at once.
        num_speculative_tokens: draft tokens of a sequence in one step.
        row_cost: seconds of one more row of a decode step, in steps of one row, before any step is
            measured.
        draft: of the draft model, ``None`` without one.
        switches_after: longest sequence with the first of two tables of rotary angles, ``None`` for
            a model with one (``longrope``). A sequence that grows beyond it is computed anew.
        grows_after: longest prompt whose rotary angles do not depend on its length, ``None`` for
            any (``dynamic`` scaling).
        window_tokens: largest window of a model whose layers with windows have blocks of their own;
            ``None`` where all layers have the same.
        num_window_blocks: these blocks.
        num_state_slots: states of running sequences, after draft tokens and saved ones, in a model
            whose layers have a recurrent state; 0 for another one.
        offload: copies of blocks that are kept when the blocks are allocated again.
    """

    token_budget: int
    max_sequences: int
    num_blocks: int
    block_size: int
    watermark: float = 0.01
    prefix_caching: bool = True
    steps_in_flight: int = 1
    num_speculative_tokens: int = 0
    row_cost: float = ROW_COST
    draft: DraftLimits | None = None
    switches_after: int | None = None
    grows_after: int | None = None
    window_tokens: int | None = None
    num_window_blocks: int = 0
    num_state_slots: int = 0
    offload: OffloadLimits = NOTHING_KEPT

    def __post_init__(self) -> None:
        for name in (
            "token_budget",
            "max_sequences",
            "num_blocks",
            "block_size",
            "steps_in_flight",
        ):
            if getattr(self, name) < 1:
                raise SpecError(
                    f"engine limits: field '{name}': found {getattr(self, name)}, expected at "
                    "least 1"
                )
        if self.num_speculative_tokens < 0:
            raise SpecError(
                f"engine limits: field 'num_speculative_tokens': found "
                f"{self.num_speculative_tokens}, expected at least 0"
            )
        if not 0 <= self.row_cost <= 1:
            raise SpecError(
                f"engine limits: field 'row_cost': found {self.row_cost}, expected 0 to 1"
            )
        needed = self.window_blocks_for(self.num_blocks * self.block_size)
        if self.num_window_blocks < needed:
            raise SpecError(
                f"engine limits: field 'num_window_blocks': found {self.num_window_blocks}, "
                f"expected at least {needed}, those of one sequence"
            )
        if not 0 <= self.watermark < 1:
            raise SpecError(
                f"engine limits: field 'watermark': found {self.watermark}, expected 0 to 1"
            )

    def new_drafts(self, propose: Propose | None = None) -> StepDrafts:
        """Return the draft tokens of a new scheduler; see :class:`StepDrafts`."""
        return StepDrafts(
            most=self.num_speculative_tokens,
            row_cost=self.row_cost,
            model=self.draft,
            block_size=self.block_size,
            propose=propose,
        )

    def rope_length(self, prompt_tokens: int, tokens: int) -> int:
        """Return the length for which the rotary angles of a sequence are made; 0 for any.

        Args:
            prompt_tokens: tokens of its prompt.
            tokens: of prompt and answer so far, those of a row of draft tokens included.
        """
        if self.grows_after is not None:
            return prompt_tokens
        return 0 if self.switches_after is None else tokens

    def rope_table(self, prompt_tokens: int, tokens: int) -> int:
        """Return a number that is equal for sequences with the same angles, which share blocks."""
        length = self.rope_length(prompt_tokens, tokens)
        if self.grows_after is not None:
            return length if length > self.grows_after else 0
        return int(self.switches_after is not None and length > self.switches_after)

    def tokens_before_switch(self, tokens: int) -> int:
        """Return the tokens that a sequence may grow by before its rotary angles change."""
        switch = self.switches_after
        return sys.maxsize if switch is None or tokens > switch else switch - tokens

    def needed_blocks(self, request: EngineRequest, available: int) -> int:
        """Return the KV blocks of a request with its longest answer.

        Raises:
            CapacityError: they are more than the available ones.
        """
        # The last token of an answer is never an input, so its keys and values are not stored.
        needed = self.blocks_for(request.prompt_tokens + request.max_tokens - 1)
        if needed > available:
            raise CapacityError(
                f"request {request.request}: {request.prompt_tokens} prompt and up to "
                f"{request.max_tokens} new tokens need {needed} KV blocks, more than the "
                f"{available} available"
            )
        return needed

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks of a number of tokens."""
        return -(-tokens // self.block_size)

    @property
    def chunk_tokens(self) -> int:
        """Most tokens of a sequence in a step: all of it, or what its windows have blocks for."""
        if self.window_tokens is None:
            return self.token_budget
        return min(self.token_budget, PROMPT_CHUNK_TOKENS)

    def window_blocks_for(self, tokens: int) -> int:
        """Return the most blocks that a sequence holds at once in layers with windows."""
        if self.window_tokens is None:
            return 0
        return kept_blocks(tokens, self.window_tokens, self.block_size, self.chunk_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A prompt, as the scheduler of an engine sees it, and how long its answer may be.

    Attributes:
        request: number, unique among the unfinished requests.
        token_ids: the prompt; ``None`` in a simulation without content, where only a preempted
            request finds its own blocks again.
        prompt_tokens: length of the prompt, at least 1.
        max_tokens: largest number of answer tokens, at least 1.
        arrival_s: arrival on the clock given to ``BlockScheduler.schedule``.
        priority: a lower value is admitted earlier by the order ``priority``.
        predicted_tokens: predicted answer tokens, for the order ``trail`` and multi-bin batching.
        cache_salt: requests share blocks only under the same salt.
        group: equal for answers of one request of a client, which take turns with other requests;
            ``None`` for a request of one answer.
        scores_prompt: every position of the prompt has an output that is needed
            (log-probabilities of the prompt). All of it is computed, and a step has a share of its
            tokens for such prompts while there are other requests.
    """

    request: int
    token_ids: tuple[int, ...] | None
    prompt_tokens: int
    max_tokens: int
    arrival_s: float
    priority: int = 0
    predicted_tokens: float | None = None
    cache_salt: str = ""
    group: str | None = None
    scores_prompt: bool = False

    def __post_init__(self) -> None:
        tokens = self.prompt_tokens if self.token_ids is None else len(self.token_ids)
        if self.prompt_tokens < 1 or self.max_tokens < 1 or tokens != self.prompt_tokens:
            raise SpecError(
                f"request {self.request}: found {self.prompt_tokens} prompt tokens, {tokens} token "
                f"ids and at most {self.max_tokens} new tokens, expected at least 1 of each"
            )


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens ``[first, first + count)`` of a sequence in a step.

    Attributes:
        request: number of the request.
        first: tokens before the chunk; their keys and values are in the blocks.
        count: tokens to compute.
        blocks: block ``i`` holds tokens ``[i * block_size, (i + 1) * block_size)``; it may have
            more blocks than ``first + count`` tokens need.
        makes_token: the chunk has the last token so far, so its output is the next one.
        num_draft_tokens: tokens at its end that are only proposed; each has an output, too.
        window_blocks: as many in layers with windows, where these have blocks of their own; those
            before the window may belong to others.
        origin: number of the step that filled the blocks of the prompt, where stages that prefill
            send keys and values to those that decode.
        slot: of the sequence's states, in layers with a recurrent state; running sequences have
            different ones.
        from_slot: slot of the saved state that the sequence goes on from; -1 for its own.
        to_slot: slot that gets a copy of the state after the chunk; -1 for none.
        draft_slot: slot of the state after the draft tokens, where ``slot`` keeps that before them;
            -1 without.
    """

    request: int
    first: int
    count: int
    blocks: tuple[int, ...]
    makes_token: bool
    num_draft_tokens: int = 0
    window_blocks: tuple[int, ...] = ()
    origin: int = 0
    slot: int = 0
    from_slot: int = -1
    to_slot: int = -1
    draft_slot: int = -1


@dataclass(frozen=True, slots=True)
class EngineStep:
    """Chunks of several sequences that an engine computes together.

    Attributes:
        number: counted from 0.
        chunks: at least one; each of another sequence.
        preempted: requests preempted since the step before.
        drafts: what a draft model computes before the step, for chunks with draft tokens.
        phase: of a step of one phase; ``None`` for one that mixes both.
    """

    number: int
    chunks: tuple[ScheduledChunk, ...]
    preempted: tuple[int, ...] = ()
    drafts: tuple[DraftWork, ...] = ()
    phase: Phase | None = None

    @property
    def rows(self) -> int:
        """Tokens without drafts."""
        return sum(chunk.count - chunk.num_draft_tokens for chunk in self.chunks)


class StepScheduler(Protocol):
    """Decides the steps of an engine, in the runtime and in simulations."""

    @property
    def drafts(self) -> StepDrafts:
        """Draft tokens of its sequences."""
        ...

    @property
    def wake_s(self) -> float:
        """When it may decide otherwise although nothing happens; infinite for never."""
        ...

    def add(self, request: EngineRequest) -> None:
        """Put a request at the end of the queue; ``CapacityError`` if it does not fit at all."""
        ...

    def abort(self, request: int) -> bool:
        """Remove a request, or end it with its step in flight; return if it was unfinished."""
        ...

    def schedule(self, now_s: float) -> EngineStep | None:
        """Return the next step, or ``None`` if there is none now.

        Args:
            now_s: time on the clock of the arrivals.
        """
        ...

    def complete_drafts(self, step: EngineStep, now_s: float, *, has_ended: bool = False) -> None:
        """Take the time at which the draft model has computed the drafts of a step, or ended."""
        ...

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

        Args:
            number: of the step.
            tokens: token id of each chunk that makes a token; aborted requests are ignored.
            finished: requests whose answer is complete with this token.
            accepted: draft tokens of a request that come before its token, if there are any.
            now_s: time on the clock of ``schedule``; without it, the step measures nothing.

        Raises:
            LlmpqError: the step is not in flight, or a token is missing.
        """
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class EngineSequence:
    """State of an unfinished request: its tokens, its blocks, the step that it is in.

    ``tokens`` counts prompt and answer so far; ``computed`` those with keys and values in
    ``blocks``, the step in flight with its draft tokens included; where layers have a state, that
    after these tokens is in ``slot``. ``window_blocks`` are those of
    layers with windows, of which it holds those from ``window_first`` on. ``slot`` numbers its
    states in layers with a recurrent state, -1 without one; it begins with the saved state in
    ``from_slot``, if that is not -1; ``draft_slot`` has those after the draft tokens of a step in
    flight. ``saved`` is the key of the newest state saved of the answer.
    """

    request: EngineRequest
    tokens: int
    ids: list[int] | None
    credit: DraftCredit
    turn: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    table: tuple[int, ...] = ()
    window_blocks: list[int] = field(default_factory=list)
    window_first: int = 0
    window_table: tuple[int, ...] = ()
    keys: list[BlockKey] = field(default_factory=list)
    slot: int = -1
    from_slot: int = -1
    draft_slot: int = -1
    saved: BlockKey | None = None
    in_step: int | None = None
    last_step: int = -1
    is_aborted: bool = False
    was_admitted: bool = False

    @property
    def most_draft_tokens(self) -> int:
        """Tokens of the longest answer that a draft can have; its last one is never an input."""
        return self.request.prompt_tokens + self.request.max_tokens - 1 - self.tokens


class StepInFlight(NamedTuple):
    """A step that is not complete: when it began, and its chunks."""

    start_s: float
    chunks: tuple[ScheduledChunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """Memory of a draft model, and what it is expected to cost.

    Attributes:
        num_blocks: its KV blocks, of as many tokens as those of the engine.
        cost: seconds of a pass over one sequence, in decode steps of one sequence, before any is
            measured.
        handover: seconds of sending a step's token ids to its process and back, in such steps.
        stage: rank of the stage on its device, ``None`` on a device without one.
        max_tokens: of its longest sequence, ``None`` when unlimited.
        reads_states: whether it reads the hidden states of every step, and shares the blocks of the
            sequences: the model's layer for multi-token prediction.
    """

    num_blocks: int
    cost: float
    handover: float = 0.0
    stage: int | None = 0
    max_tokens: int | None = None
    reads_states: bool = False

    def __post_init__(self) -> None:
        if self.num_blocks < 1 or not self.cost > 0:
            raise SpecError(
                f"draft model: found {self.num_blocks} KV blocks and a cost of {self.cost:g}, "
                "expected at least 1 and more than 0"
            )


def planned_limits(
    plan: Plan, num_blocks: int, max_tokens: int | None = None
) -> DraftLimits | None:
    """Return the limits of a plan's draft model, ``None`` without one."""
    if plan.draft is None:
        return None
    stages = {stage.device: stage.rank for stage in plan.stages}
    return DraftLimits(
        num_blocks=num_blocks,
        cost=plan.draft.cost,
        handover=plan.draft.handover or 0.0,
        stage=stages.get(plan.draft.device),
        max_tokens=max_tokens,
    )


class DraftWork(NamedTuple):
    """Draft tokens of a sequence: what a draft model computes before a step.

    Attributes:
        request: number of the request.
        first: tokens that the draft model knows: their keys and values are in the blocks.
        tokens: prompt and answer so far.
        length: draft tokens to propose; all but the last one are inputs, too.
        blocks: block ``i`` holds tokens ``[i * block_size, (i + 1) * block_size)``.
    """

    request: int
    first: int
    tokens: int
    length: int
    blocks: tuple[int, ...]


class DraftCandidate(NamedTuple):
    """A sequence that decodes in the next step and may have a draft in it.

    Attributes:
        request: number of the request.
        tokens: its prompt and answer so far.
        left: draft tokens that the longest answer leaves room for.
        credit: what its drafts may lose.
    """

    request: int
    tokens: int
    left: int
    credit: DraftCredit


class DraftCosts(NamedTuple):
    """What draft tokens add to a step.

    Attributes:
        row_cost: of verifying one, in steps of its sequence.
        row_share: seconds of one more row of either model, relative to those of one.
        sequences: of the step.
    """

    row_cost: float
    row_share: float
    sequences: int


@dataclass(slots=True, eq=False)
class _Known:
    """What the draft model has of a sequence.

    ``count`` are its draft tokens in a step; its prompt is once computed without an account.
    """

    blocks: list[int] = field(default_factory=list)
    tokens: int = 0
    count: int = 0
    is_begun: bool = False


class DraftModelSchedule:
    """Decides which sequences have drafts of a draft model, and measures what they cost.

    Args:
        limits: of the draft model.
        block_size: tokens of a block.
    """

    def __init__(self, limits: DraftLimits, block_size: int) -> None:
        self._limits = limits
        self._block_size = block_size
        self._share = limits.cost
        self._observed = 0
        self._balance = FIRST_BALANCE
        self._accepted, self._rejected = FIRST_ACCEPTED, FIRST_REJECTED
        self._row_cost = 0.0  # in steps
        self.clear()

    @property
    def share(self) -> float:
        """Seconds of a pass, in steps: what a draft token costs before it is verified."""
        return self._share

    def clear(self) -> None:
        """Forget all sequences."""
        self._allocator = BlockAllocator(self._limits.num_blocks)
        self._known: OrderedDict[int, _Known] = OrderedDict()  # drafted longest ago first
        self._works: list[DraftWork] = []
        self._begins = False

    def lengths(
        self, candidates: Sequence[DraftCandidate], most: int, costs: DraftCosts
    ) -> tuple[dict[int, int], float]:
        """Return how many draft tokens of each sequence pay, and what one of them costs.

        Args:
            candidates: sequences of the next step that decode.
            most: draft tokens of a sequence.
            costs: of the step.
        """
        self._row_cost = costs.row_cost / costs.sequences
        cost = costs.row_cost + self._share
        counts = dict.fromkeys((one.request for one in candidates), 0)
        for one in candidates:
            if self._balance > 0 and self._pays(one, most, costs):
                counts[one.request] = min(most, one.left, one.credit.longest(cost))
        depth = 0
        for passes in range(1, max(counts.values(), default=0) + 1):
            saved = sum(
                one.credit.share**passes - costs.row_cost
                for one in candidates
                if counts[one.request] >= passes
            )
            # The first pass of all may lose: it shows what is accepted.
            if passes > 1 and saved < self._share * costs.sequences:
                break
            depth = passes
        drafted = sum(count > 0 for count in counts.values())
        cost = costs.row_cost + self._share * costs.sequences / max(1, drafted)
        return {request: min(count, depth) for request, count in counts.items()}, cost

    def _pays(self, one: DraftCandidate, most: int, costs: DraftCosts) -> bool:
        """Whether the draft model goes on with a sequence, or it pays to begin with it."""
        known = self._known.get(one.request)
        unknown = one.tokens - (0 if known is None else known.tokens)
        if self._limits.reads_states or unknown <= FEW_TOKENS:
            return True
        share = self._accepted / (self._accepted + self._rejected)
        saved, made, chance = 0.0, 1.0, 1.0
        for passes in range(1, most + 1):
            chance *= share
            made += chance
            saved = max(saved, (made - 1 - passes * (costs.row_cost + self._share)) / made)
        begin = costs.sequences * self._share * (1 + costs.row_share * (unknown - 1))
        return one.left * saved > begin

    def reserve(self, request: int, tokens: int, most: int) -> int:
        """Return how many draft tokens the next step has of a sequence, 0 or up to ``most``.

        Args:
            request: number of the request.
            tokens: its prompt and answer so far.
            most: at least 1.
        """
        if self._limits.max_tokens is not None:
            most = min(most, self._limits.max_tokens - tokens)
        known = self._known.get(request) or _Known()
        if self._limits.reads_states:
            known.tokens = tokens - 1
        begins = tokens - known.tokens > FEW_TOKENS
        if most < 1 or (begins and self._begins):
            return 0
        shares_blocks = self._limits.reads_states
        if not shares_blocks and not self._allocate(request, known, tokens + most - 1):
            return 0
        self._known[request] = known
        self._known.move_to_end(request)
        self._begins |= begins
        self._works.append(DraftWork(request, known.tokens, tokens, most, tuple(known.blocks)))
        known.tokens, known.count = tokens, most
        self._add(-most * self._row_cost)
        return most

    def take_works(self) -> tuple[DraftWork, ...]:
        """Return what :meth:`reserve` promised since the last call."""
        works = tuple(self._works)
        self._works.clear()
        self._begins = False
        return works

    def measure(
        self, works: Sequence[DraftWork], seconds: float, step_s: float | None, row_share: float
    ) -> None:
        """Take the time of the passes before a step.

        Args:
            works: what they computed.
            seconds: they took.
            step_s: expected seconds of the step without drafts, ``None`` if that is not known.
            row_share: seconds of one more row, relative to those of one; taken for both models.
        """
        passes = max(work.length for work in works)
        caught_up = max(work.tokens - work.first for work in works)
        rows = sum(work.tokens - work.first for work in works) - len(works)
        steps = seconds / step_s if step_s else passes * self._share
        if step_s and caught_up <= MAX_STEP_TOKENS:
            found = steps / (passes + row_share * rows)
            most = MOST_DISTURBED * self._share if self._observed else 1.0
            self._observed = min(self._observed + 1, SMOOTHED_DRAFTS)
            self._share += (min(found, most) - self._share) / self._observed
        states = [self._known[work.request] for work in works]
        has_prompt = not all(state.is_begun for state in states)
        self._add(-min(steps, passes * self._share) if has_prompt else -steps)
        for state in states:
            state.is_begun = True

    def verify(self, request: int, accepted: int, sequences: int) -> None:
        """Take what a step made of a sequence, with or without drafts.

        Args:
            request: number of the request.
            accepted: draft tokens that are tokens of the answer now.
            sequences: of the step.
        """
        self._add((accepted + CREDIT_OF_TOKEN * (accepted + 1)) / sequences)
        known = self._known.get(request)
        if known is not None and known.count:
            self._accepted = KEPT_DRAFTS * self._accepted + accepted
            self._rejected = KEPT_DRAFTS * self._rejected + (accepted < known.count)
            known.tokens += min(accepted, known.count - 1)
            known.count = 0
        # Slowly back to the first values, so that no wrong one ends all drafts for good.
        self._share += (self._limits.cost - self._share) / KNOWN_STEPS
        self._accepted += (FIRST_ACCEPTED - self._accepted) / KNOWN_STEPS
        self._rejected += (FIRST_REJECTED - self._rejected) / KNOWN_STEPS

    @property
    def has_ended(self) -> bool:
        """Whether there are no more drafts, since the draft model has ended."""
        return self._balance == -math.inf

    def end(self) -> None:
        """Have no more drafts: the draft model has ended."""
        self._balance = -math.inf

    def forget(self, request: int) -> None:
        """Free the blocks of a sequence."""
        known = self._known.pop(request, None)
        if known is not None:
            self._allocator.free(known.blocks)

    def _add(self, steps: float) -> None:
        self._balance = min(MOST_BALANCE, self._balance + steps)

    def _allocate(self, request: int, known: _Known, tokens: int) -> bool:
        """Give a sequence the blocks of so many tokens; return whether that was possible."""
        missing = -(-tokens // self._block_size) - len(known.blocks)
        free, losers = self._allocator.num_free, []
        for other, state in self._known.items():
            if free >= missing:
                break
            if other != request and not state.count:
                losers.append(other)
                free += len(state.blocks)
        if missing > free:
            return False
        for other in losers:
            state = self._known[other]
            self._allocator.free(state.blocks)
            state.blocks, state.tokens = [], 0
        if missing > 0:
            known.blocks += self._allocator.allocate(missing)
        return True


class StepDrafts:
    """Gives sequences that decode as many draft tokens as are worth their time.

    Args:
        most: draft tokens of a sequence in a step.
        row_cost: of one more row of a step, before any step is measured, in steps of one row.
        model: limits of a draft model, ``None`` without one.
        block_size: tokens of one of its KV blocks.
        propose: finds the draft tokens of a sequence; ``None`` with a draft model, and for no
            speculative decoding.

    Attributes:
        propose: may be set later.
        num_drafts, num_draft_tokens, num_accepted_tokens: so far.
    """

    def __init__(
        self,
        *,
        most: int = 0,
        row_cost: float = ROW_COST,
        model: DraftLimits | None = None,
        block_size: int = 1,
        propose: Propose | None = None,
    ) -> None:
        self._most = most
        self.propose = propose
        self._row_cost = RowCost(row_cost)
        self._model = None if model is None else DraftModelSchedule(model, block_size)
        self._last_end_s = -math.inf
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0

    @property
    def is_on(self) -> bool:
        """Whether there is speculative decoding."""
        return self.propose is not None or self._model is not None

    def first_credit(self) -> DraftCredit:
        """Return the credit of a new sequence."""
        return DraftCredit(FIRST_CREDIT if self._model is None else FIRST_MODEL_CREDIT)

    def longest(
        self, candidates: Sequence[DraftCandidate], rows: int, sequences: int
    ) -> tuple[dict[int, int], float]:
        """Return how many draft tokens of each sequence pay, and what one of them costs.

        Args:
            candidates: sequences of the step that decode.
            rows: tokens of the step without drafts.
            sequences: of the step.
        """
        cost = self._row_cost.of_draft_token(rows)
        if self._model is None:
            found = {one.request: one.credit.longest(cost) for one in candidates}
            return {request: min(self._most, count) for request, count in found.items()}, cost
        if self._model.has_ended:
            return dict.fromkeys((one.request for one in candidates), 0), cost
        costs = DraftCosts(cost, self._row_cost.share, sequences)
        return self._model.lengths(candidates, self._most, costs)

    def draft(self, one: DraftCandidate, most: int, cost: float) -> int:
        """Find up to ``most`` draft tokens of a sequence, or reserve them; return how many.

        Args:
            one: the sequence.
            most: draft tokens; none are sought where it is not positive.
            cost: of one, as :meth:`longest` returned it.
        """
        if most <= 0:
            return 0
        if self._model is not None:
            count = self._model.reserve(one.request, one.tokens, most)
        else:
            assert self.propose is not None
            count = self.propose(one.request, most)
        if count:
            one.credit.spend(count, cost)
            self.num_drafts += 1
            self.num_draft_tokens += count
        return count

    def take_works(self) -> tuple[DraftWork, ...]:
        """Return what the draft model computes before the step."""
        return () if self._model is None else self._model.take_works()

    def measure_works(
        self, works: Sequence[DraftWork], rows: int, seconds: float, *, has_ended: bool
    ) -> None:
        """Take the seconds of the draft model before a step; it may have ended for good.

        Args:
            works: what it computed.
            rows: tokens of the step without drafts.
            seconds: it took.
            has_ended: there are no more drafts.
        """
        assert self._model is not None
        cost = self._row_cost
        self._model.measure(works, seconds, cost.step_s(rows), cost.share)
        if has_ended:  # the step has any tokens in their place
            self._model.end()
            self.num_drafts -= len(works)
            self.num_draft_tokens -= sum(work.length for work in works)

    def measure_step(self, start_s: float, end_s: float, rows: int | None) -> float:
        """Take the times of a step; return the seconds since it began or the last was complete.

        Args:
            start_s: when it was dispatched.
            end_s: when its tokens were chosen.
            rows: of a decode step; ``None`` for a step with prompts, which says nothing of a row.
        """
        seconds = end_s - max(start_s, self._last_end_s)
        self._last_end_s = end_s
        if rows is not None and self.is_on:
            self._row_cost.observe(rows, seconds)
        return seconds

    def verify(
        self,
        request: int,
        credit: DraftCredit,
        accepted: int,
        proposed: int,
        rows: int,
        *,
        is_repeated: bool = False,
    ) -> None:
        """Take how many of the draft tokens of a sequence are right.

        Args:
            request: number of the request.
            credit: of its sequence.
            accepted: draft tokens that are right.
            proposed: draft tokens of the step.
            rows: sequences of the step.
            is_repeated: whether the next step computes the accepted ones again.
        """
        credit.earn(accepted, proposed)
        if is_repeated:
            credit.spend(accepted, self._row_cost.of_draft_token(rows))
        self.num_accepted_tokens += accepted
        if self._model is not None:
            self._model.verify(request, accepted, rows)

    def forget(self, request: int) -> None:
        """Free what the draft model has of a sequence."""
        if self._model is not None:
            self._model.forget(request)
