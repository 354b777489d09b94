"""Random arrival times: Poisson, gamma gaps, and a process with a calm and a busy state."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from llmpq.errors import SpecError
from llmpq.spec.trace import TraceRequest

ARRIVALS = ("poisson", "gamma", "two_state")
BUSY_RATIO = 4.0
"""Rate of the busy state over that of the calm one."""
DWELL_S = 30.0
"""Mean seconds in a state."""


def draw_arrivals(
    name: str, count: int, requests_per_s: float, *, cv: float = 2.0, seed: int = 0
) -> list[float]:
    """Return increasing arrival times in seconds.

    Args:
        name: ``poisson``, ``gamma`` (independent gaps with a coefficient of variation ``cv``) or
            ``two_state`` (Poisson with a rate that changes between two values, the busy one
            ``BUSY_RATIO`` times the calm one, after exponential times of mean ``DWELL_S``).
        count: number of arrivals.
        requests_per_s: mean rate.
        cv: standard deviation of the gaps over their mean, for ``gamma``; 1 is Poisson.
        seed: of the random numbers.

    Raises:
        SpecError: an unknown name, or a rate or ``cv`` that is not positive.
    """
    if not (0 < requests_per_s < math.inf and 0 < cv < math.inf):
        raise SpecError(f"arrivals: found a rate of {requests_per_s} and cv {cv}, expected above 0")
    chance = random.Random(seed)
    if name == "poisson":
        gaps = [chance.expovariate(requests_per_s) for _ in range(count)]
    elif name == "gamma":
        shape = 1.0 / cv**2
        gaps = [chance.gammavariate(shape, 1.0 / (shape * requests_per_s)) for _ in range(count)]
    elif name == "two_state":
        return _two_state(count, requests_per_s, chance)
    else:
        raise SpecError(f"arrivals: found '{name}', expected one of {', '.join(ARRIVALS)}")
    times, now_s = [], 0.0
    for gap in gaps:
        now_s += gap
        times.append(now_s)
    return times


def with_arrivals(
    trace: Sequence[TraceRequest], times: Sequence[float]
) -> tuple[TraceRequest, ...]:
    """Return the requests in their order with other arrival times."""
    return tuple(replace(item, arrival_s=time_s) for item, time_s in zip(trace, times, strict=True))


def _two_state(count: int, requests_per_s: float, chance: random.Random) -> list[float]:
    calm = 2.0 * requests_per_s / (1.0 + BUSY_RATIO)
    rates = calm, BUSY_RATIO * calm
    state, now_s = chance.randrange(2), 0.0
    change_s = chance.expovariate(1.0 / DWELL_S)
    times: list[float] = []
    while len(times) < count:
        next_s = now_s + chance.expovariate(rates[state])
        if next_s < change_s:
            now_s = next_s
            times.append(now_s)
        else:  # exponential gaps have no memory, so the next one starts at the change
            now_s, state = change_s, 1 - state
            change_s = now_s + chance.expovariate(1.0 / DWELL_S)
    return times
