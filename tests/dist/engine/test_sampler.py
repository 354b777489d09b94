"""Sampling: greedy is argmax, truncation keeps the right tokens, draws depend on the key only."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from llmpq.dist.engine.sampler import Sampler
from llmpq.dist.io.sampling_params import SamplingParams
from llmpq.errors import SpecError, StageError

LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()


def _counts(sampling: SamplingParams, draws: int = 2000) -> Counter[int]:
    keys = [(f"request {n}", 1) for n in range(draws)]
    return Counter(Sampler(sampling).sample(LOGITS.expand(draws, -1), keys))


def test_greedy_takes_the_best():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 0.0]])
    assert Sampler(SamplingParams()).sample(logits, [("a", 1), ("b", 1)]) == [1, 0]


def test_draws_follow_the_distribution():
    counts = _counts(SamplingParams(temperature=1.0))
    for token, share in enumerate((0.5, 0.3, 0.15, 0.05)):
        assert abs(counts[token] / 2000 - share) < 4 * math.sqrt(share * (1 - share) / 2000)


def test_temperature_sharpens():
    expected = 0.25 / (0.25 + 0.09 + 0.0225 + 0.0025)
    assert abs(_counts(SamplingParams(temperature=0.5))[0] / 2000 - expected) < 0.05


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (SamplingParams(temperature=1.0, top_k=2), {0, 1}),
        (SamplingParams(temperature=1.0, top_p=0.6), {0, 1}),
        (SamplingParams(temperature=1.0, top_p=0.4), {0}),
        (SamplingParams(temperature=1.0, top_k=99), {0, 1, 2, 3}),
        (SamplingParams(temperature=1.0, top_k=3, top_p=0.9), {0, 1, 2}),
    ],
)
def test_truncation_keeps(sampling, kept):
    assert set(_counts(sampling)) == kept


def test_a_draw_does_not_depend_on_its_neighbours():
    sampler = Sampler(SamplingParams(temperature=1.0, seed=5))
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    keys = [(f"r{n}", n) for n in range(6)]
    together = sampler.sample(logits, keys)
    order = [4, 2, 0, 5, 1, 3]
    alone = {n: sampler.sample(logits[n : n + 1], [keys[n]])[0] for n in order}
    assert together == [alone[n] for n in range(6)]


def test_seed_and_step_change_the_draw():
    def draws(seed: int, step: int) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed))
        return sampler.sample(torch.zeros(20, 1000), [(f"r{n}", step) for n in range(20)])

    assert draws(0, 1) == draws(0, 1)
    assert draws(0, 1) != draws(1, 1)
    assert draws(0, 1) != draws(0, 2)


@pytest.mark.parametrize(
    "options", [{"temperature": -1.0}, {"temperature": math.nan}, {"top_k": -1}, {"top_p": 0.0}]
)
def test_senseless_options_are_refused(options):
    with pytest.raises(SpecError, match=next(iter(options))):
        SamplingParams(**options)


def test_scores_that_are_no_numbers_are_an_error():
    with pytest.raises(StageError, match="NaN") as caught:
        Sampler(SamplingParams()).sample(torch.tensor([[math.nan, 1.0]]), [("a", 1)])
    assert caught.value.is_permanent  # another start would read the same weights
