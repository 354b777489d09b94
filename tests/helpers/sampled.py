"""The next tokens of several rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from llmpq.dist.engine.engine import Choice, SampledToken, SamplingState, ScoredRows


def sampled(logits: Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
    assert len(states) == len(logits)
    rows = ScoredRows(logits, [Choice(row, state) for row, state in enumerate(states)])
    return [rows.sample(row, state) for row, state in enumerate(states)]
