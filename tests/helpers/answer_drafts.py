"""Drafts from known answers, some of whose tokens are wrong."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llmpq.batching.engine_step import DraftModelSchedule
from llmpq.batching.speculation import DraftCredit, SpeculativeConfig
from llmpq.dist.engine import engine

DRAFTS = SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_min=1)


class AnswerDrafts:
    """Proposes the next tokens of the answer to a prompt; where a third begins, the last is wrong.

    Args:
        sequences: prompt and answer of each request; no two prompts begin with the same token.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._sequences = {sequence[0]: list(sequence) for sequence in sequences}

    def __call__(self, _: SpeculativeConfig) -> AnswerDrafts:
        return self

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        whole = self._sequences[tokens[0]]
        assert whole[: len(tokens)] == list(tokens)
        draft = whole[len(tokens) : len(tokens) + most]
        if draft and len(tokens) % 3 == 0:
            draft[-1] = (draft[-1] + 1) % 90
        return draft


def draft_freely(patch: pytest.MonkeyPatch, drafts: AnswerDrafts | None = None) -> None:
    """Let drafts lose any number of steps; they have these tokens, if any are given."""
    patch.setattr(DraftCredit, "longest", lambda *_: 31)
    patch.setattr(
        DraftModelSchedule,
        "lengths",
        lambda _, candidates, most, __: ({one.request: most for one in candidates}, 0.0),
    )
    if drafts is not None:
        patch.setattr(engine, "PromptLookup", drafts)
