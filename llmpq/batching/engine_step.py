"""Steps of an engine: its limits, requests, chunks of a step, and the interface of a scheduler.

A ``BlockScheduler`` mixes decode rows and prompt chunks over KV blocks that sequences take as they
grow; a ``PolicyScheduler`` obeys a batching policy over slots.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from llmpq.batching.blocks import BlockKey
from llmpq.batching.drafts import DraftLimits, DraftWork, Propose, StepDrafts
from llmpq.batching.speculation import ROW_COST, DraftCredit
from llmpq.errors import CapacityError, SpecError
from llmpq.spec.precision import Phase
from llmpq.spec.runtime_constants import PROMPT_CHUNK_TOKENS, kept_blocks

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
        predicted_tokens: predicted answer tokens, for the order ``trail``.
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
    """

    request: int
    first: int
    count: int
    blocks: tuple[int, ...]
    makes_token: bool
    num_draft_tokens: int = 0
    window_blocks: tuple[int, ...] = ()
    origin: int = 0


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
    ``blocks``, the step in flight with its draft tokens included. ``window_blocks`` are those of
    layers with windows, of which it holds those from ``window_first`` on.
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
