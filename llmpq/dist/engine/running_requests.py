"""Requests that hold a slot: their tokens, and the drafts of their next ones.

A decode micro-batch of n sequences has n rows, and one more for each draft token: a row attends to
those before it, whose keys and values the same step writes to the slot. Those of rejected tokens
are overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmpq.batching import RequestRecord
from llmpq.batching.prompt_lookup import PromptLookup
from llmpq.batching.speculation import (
    MAX_STEP_TOKENS,
    DraftCredit,
    RowCost,
    SpeculativeConfig,
)
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
        first_row_cost: seconds of one more row of a decode step, in steps of one row, before any
            step is measured.
    """

    def __init__(self, config: SpeculativeConfig, first_row_cost: float) -> None:
        self._config = config
        self._row_cost = RowCost(first_row_cost)

    def propose(self, members: Sequence[RunningRequest]) -> None:
        """Set the drafts of the members of a decode micro-batch."""
        left = MAX_STEP_TOKENS - len(members)
        cost = self._row_cost.of_draft_token(len(members))
        for member in members:
            member.draft = ()
            # The last token of an answer is never an input.
            needed = member.request.max_new_tokens - len(member.token_ids) - 1
            credit = member.credit.longest(cost)
            most = min(self._config.num_speculative_tokens, left, needed, credit)
            if most > 0 and not member.is_complete:
                if member.lookup is None:
                    member.lookup = PromptLookup(self._config)
                tokens = [*member.request.prompt_token_ids, *member.token_ids]
                member.draft = member.lookup.propose(tokens, most)
                member.credit.spend(len(member.draft), cost)
                left -= len(member.draft)

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


def drafts_of(config: SpeculativeConfig | None, first_row_cost: float) -> MicroBatchDrafts | None:
    """Return the drafts of a run; ``None`` without speculative decoding."""
    return None if config is None else MicroBatchDrafts(config, first_row_cost)
