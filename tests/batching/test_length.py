"""Length predictors and bin boundaries."""

from __future__ import annotations

import math
from statistics import mean, stdev

import pytest

from llmpq.batching import WaitingRequest
from llmpq.batching.length import (
    EmpiricalPredictor,
    NoisyPredictor,
    OraclePredictor,
    RegressionPredictor,
)
from llmpq.batching.policies.multibin import quantile_boundaries
from llmpq.errors import LlmpqError, SpecError


def _request(number: int, prompt_tokens: int = 5) -> WaitingRequest:
    return WaitingRequest(request=number, prompt_tokens=prompt_tokens)


def test_oracle_returns_the_true_length():
    assert OraclePredictor([4, 9])(_request(1)) == 9
    with pytest.raises(LlmpqError, match="no length is known of request 2"):
        OraclePredictor([4, 9])(_request(2))


def test_empirical_predictor_returns_the_mean():
    assert EmpiricalPredictor([1, 2, 6])(_request(0)) == 3
    with pytest.raises(SpecError):
        EmpiricalPredictor([])


def test_noise_has_the_given_deviation():
    noisy = NoisyPredictor(OraclePredictor([100] * 4000), sigma=0.3, seed=1)
    logs = [math.log(noisy(_request(number)) / 100) for number in range(4000)]
    assert abs(mean(logs)) < 0.02
    assert stdev(logs) == pytest.approx(0.3, rel=0.05)
    assert noisy(_request(7)) == noisy(_request(7))


def test_regression_recovers_a_line():
    predictor = RegressionPredictor([1, 2, 3, 10], [5, 7, 9, 23])
    assert predictor(_request(0, prompt_tokens=20)) == pytest.approx(43)
    assert RegressionPredictor([4, 4], [2, 6])(_request(0)) == 4
    with pytest.raises(SpecError):
        RegressionPredictor([1], [])


def test_quantile_boundaries():
    assert quantile_boundaries(range(100), 4) == (25, 50, 75)
    with pytest.raises(SpecError):
        quantile_boundaries([], 2)
