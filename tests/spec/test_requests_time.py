"""How long a number of requests takes, and how long durations are written."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.builders import plan_request

from llmpq.assigner import make_plan
from llmpq.spec.plan import Plan, seconds_of_requests
from llmpq.units import format_duration


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(plan_request())


def replica(plan: Plan, latency_s: float, batch: int) -> Plan:
    estimate = replace(plan.estimate, latency_s=latency_s)
    micro = replace(plan.micro_batching, prefill=1, decode=1)
    return replace(
        plan,
        estimate=estimate,
        micro_batching=micro,
        workload=replace(plan.workload, batch=batch),
    )


def by_clock(each: list[tuple[float, int]], number: int) -> float:
    """Return the first end of a batch by which so many requests are answered."""
    ends = sorted({count * latency_s for latency_s, _ in each for count in range(1, number + 1)})
    return next(
        end_s
        for end_s in ends
        if sum(math.floor(end_s / latency_s + 1e-9) * batch for latency_s, batch in each) >= number
    )


def test_one_plan_takes_its_batches_one_after_another(plan) -> None:
    one = replica(plan, 2.5, 64)
    assert seconds_of_requests([one], 1) == 2.5
    assert seconds_of_requests([one], 64) == 2.5
    assert seconds_of_requests([one], 65) == 5.0
    assert seconds_of_requests([one], 50_000) == pytest.approx(782 * 2.5)


@pytest.mark.parametrize("seed", range(30))
def test_replicas_take_batches_whenever_they_are_free(plan, seed) -> None:
    rng = np.random.default_rng(seed)
    each = [
        (float(rng.integers(1, 20)) / 4, int(rng.integers(1, 9))) for _ in range(rng.integers(1, 4))
    ]
    number = int(rng.integers(1, 200))
    plans = [replica(plan, latency_s, batch) for latency_s, batch in each]
    assert seconds_of_requests(plans, number) == pytest.approx(by_clock(each, number))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "12.3 ms"),
        (119.0, "119 s"),
        (120.0, "2 min"),
        (24_631.0, "6 h 51 min"),
        (3600.0, "1 h 0 min"),
        (47.9 * 3600, "47 h 54 min"),
        (76 * 3600.0, "3 d 4 h"),
    ],
)
def test_long_durations_are_hours_and_minutes(seconds, text) -> None:
    assert format_duration(seconds) == text
