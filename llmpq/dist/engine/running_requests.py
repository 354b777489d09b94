"""Requests that hold a slot: their tokens, and the drafts of their next ones.

A decode micro-batch of n sequences has n rows, and one more for each draft token: a row attends to
those before it, whose keys and values the same step writes to the slot. Those of rejected tokens
are overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llmpq.batching import RequestRecord
from llmpq.batching.draft_model import (
    FIRST_MODEL_CREDIT,
    DraftModelSchedule,
    DraftWish,
    StepCosts,
)
from llmpq.batching.engine_step import EngineLimits
from llmpq.batching.prompt_lookup import PromptLookup
from llmpq.batching.speculation import (
    MAX_STEP_TOKENS,
    DraftCredit,
    RowCost,
    SpeculativeConfig,
)
from llmpq.dist.engine.draft_model import Drafter
from llmpq.dist.engine.sampler import SamplingState
from llmpq.dist.io.prompts import Request
from llmpq.dist.io.results import FinishReason


@dataclass(slots=True, kw_only=True, eq=False)
class RunningRequest:
    """A request that holds a slot, and its tokens so far.

    Attributes:
        origin: number of the prefill micro-batch that filled its blocks.
        sampling: its tokens so far, and how the next one is chosen.
        draft: tokens proposed in its micro-batch in flight, after the newest one.
        lookup: finds drafts; ``None`` before the first one.
        draft_number: by which a draft model knows it; ``None`` before the first draft.
        credit: what its drafts may still lose.
    """

    request: Request
    start_s: float
    origin: int
    sampling: SamplingState
    first_token_s: float = 0.0
    is_aborted: bool = False
    draft: Sequence[int] = ()
    lookup: PromptLookup | None = None
    draft_number: int | None = None
    credit: DraftCredit = field(default_factory=DraftCredit)

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the answer so far."""
        return self.sampling.token_ids

    @property
    def is_complete(self) -> bool:
        """Whether no further token is made for it."""
        return self.is_aborted or self.finish_reason is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer is complete; ``None`` while it is not."""
        return self.sampling.finish_reason(self.request.max_new_tokens)

    def record(self, number: int, end_s: float) -> RequestRecord:
        """Return the record of the finished request."""
        return RequestRecord(
            request=number,
            prompt_tokens=len(self.request.prompt_token_ids),
            new_tokens=len(self.token_ids),
            arrival_s=self.request.arrival_s,
            start_s=self.start_s,
            first_token_s=self.first_token_s,
            end_s=end_s,
        )


class MicroBatchDrafts:
    """Proposes draft tokens for decode micro-batches, as many as are worth their time.

    Args:
        config: where drafts come from.
        limits: first costs of a row and of a draft model; its KV blocks.
        model: the draft model; ``None`` for prompt lookup.
        clock: seconds.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        limits: EngineLimits,
        model: Drafter | None,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._limits = limits
        self._row_cost = RowCost(limits.row_cost)
        self._model = model
        self._schedule: DraftModelSchedule | None = None
        if limits.draft is not None:
            self._schedule = DraftModelSchedule(limits.draft, limits.block_size)
        self._clock = clock
        self._next_number = 0

    def propose(self, members: Sequence[RunningRequest]) -> None:
        """Set the drafts of the members of a decode micro-batch."""
        left = MAX_STEP_TOKENS - len(members)
        longest, cost = self._longest(members)
        for member, paid in zip(members, longest, strict=True):
            member.draft = ()
            most = min(paid, left, _most_draft_tokens(member, self._limits))
            if most > 0 and not member.is_complete:
                count = self._draft(member, most)
                member.credit.spend(count, cost)
                left -= count
        if self._schedule is not None and self._model is not None:
            self._compute(members, self._schedule, self._model)

    def _longest(self, members: Sequence[RunningRequest]) -> tuple[list[int], float]:
        """Return how many draft tokens of each member pay, and what one of them costs."""
        most, cost = (
            self._config.num_speculative_tokens,
            self._row_cost.of_draft_token(len(members)),
        )
        if self._schedule is None:
            return [min(most, member.credit.longest(cost)) for member in members], cost
        for member in members:
            if member.draft_number is None:
                member.draft_number, self._next_number = self._next_number, self._next_number + 1
                member.credit = DraftCredit(FIRST_MODEL_CREDIT)
        wishes = [
            DraftWish(
                member.draft_number or 0,
                len(_tokens_of(member)),
                0 if member.is_complete else _most_draft_tokens(member, self._limits),
                member.credit,
            )
            for member in members
        ]
        costs = StepCosts(cost, self._row_cost.share, len(members))
        found, cost = self._schedule.lengths(wishes, most, costs)
        return [found[wish.request] for wish in wishes], cost

    def _draft(self, member: RunningRequest, most: int) -> int:
        """Find a draft, or reserve one of the draft model; return its length."""
        if self._schedule is not None:
            assert member.draft_number is not None
            return self._schedule.reserve(member.draft_number, len(_tokens_of(member)), most)
        if member.lookup is None:
            member.lookup = PromptLookup(self._config)
        member.draft = member.lookup.propose(_tokens_of(member), most)
        return len(member.draft)

    def _compute(
        self, members: Sequence[RunningRequest], schedule: DraftModelSchedule, model: Drafter
    ) -> None:
        """Let the draft model compute the drafts that are reserved."""
        works = schedule.take_works()
        if not works:
            return
        start_s = self._clock()
        by_number = {member.draft_number: member for member in members}
        drafted = [by_number[work.request] for work in works]
        drafts = model.propose(works, [_tokens_of(member) for member in drafted])
        if drafts is None:
            schedule.end()
            return
        for member, draft in zip(drafted, drafts, strict=True):
            member.draft = draft
        step_s, share = self._row_cost.step_s(len(members)), self._row_cost.share
        schedule.measure(works, self._clock() - start_s, step_s, share)

    def take_prefill(self, start_s: float, end_s: float) -> None:
        """Take the times of a prefill micro-batch on the stages that decode."""
        self._row_cost.complete_step(start_s, end_s)

    def take_decode(
        self, start_s: float, end_s: float, members: Sequence[RunningRequest], made: Sequence[int]
    ) -> None:
        """Take the times of a decode micro-batch, and how many tokens it made of each member."""
        rows = sum(1 + len(member.draft) for member in members)
        self._row_cost.complete_step(start_s, end_s, rows)
        for member, tokens in zip(members, made, strict=True):
            if tokens:
                member.credit.earn(tokens - 1, len(member.draft))
            number = member.draft_number
            if self._schedule is not None and number is not None:
                if tokens:
                    self._schedule.verify(number, tokens - 1, len(members))
                if member.is_complete:
                    self._schedule.forget(number)


def _most_draft_tokens(member: RunningRequest, limits: EngineLimits) -> int:
    """Return the longest draft: the last token of an answer is never an input."""
    tokens = len(member.request.prompt_token_ids) + len(member.token_ids)
    left = member.request.max_new_tokens - len(member.token_ids) - 1
    return min(left, limits.tokens_before_switch(tokens))


def _tokens_of(member: RunningRequest) -> list[int]:
    return [*member.request.prompt_token_ids, *member.token_ids]


def drafts_of(
    config: SpeculativeConfig | None,
    limits: EngineLimits,
    model: Drafter | None,
    clock: Callable[[], float],
) -> MicroBatchDrafts | None:
    """Return the drafts of a run; ``None`` without speculative decoding."""
    return None if config is None else MicroBatchDrafts(config, limits, model, clock)
