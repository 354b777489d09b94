"""Mean time to first token (TTFT) of replicas that share arrivals, by the forecasts of their plans.

A replica computes prompts in order of arrival while other sequences decode. A prompt takes ``w``
seconds on its way through all stages and ``p`` seconds of the slowest stage; the other tokens of a
request take ``d`` seconds of it. With ``x`` requests a second, ``1 - x d`` of the time is left for
prompts, which wait as in a queue of constant service time and random arrivals (M/D/1,
Pollaczek-Khinchine)::

    T(x) = w / (1 - x d) + x p^2 / (2 (1 - x d) (1 - x (p + d)))

``x T(x)`` is convex, so that the best shares of several replicas have equal marginal times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmpq.batching import uniform_depth
from llmpq.errors import InfeasibleError
from llmpq.spec.plan import Plan
from llmpq.spec.precision import Phase

MAX_USE = 0.99
"""Share of its time that a replica may be busy: above, the wait depends on the smallest error."""
STEPS = 60
"""Of each bisection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpeed:
    """Seconds that one request takes of a replica.

    Attributes:
        way_s: of its prompt, through all stages.
        prefill_s: of its prompt at the slowest stage.
        decode_s: of its other tokens at the slowest stage, their share of full decode rounds.
    """

    way_s: float
    prefill_s: float
    decode_s: float

    @classmethod
    def of(cls, plan: Plan) -> ReplicaSpeed:
        """Return the forecast of an engine that runs a plan with packed steps.

        Prompts take time in proportion to their tokens. The engine has more steps in flight than
        stages; each takes as long as the plan's decode micro-batch, for it reads the same weights.
        """
        stages, prompts = plan.estimate.stages, plan.micro_batching.prefill
        slowest_s = max(max(stage.prefill_s, stage.send_prefill_s) for stage in stages)
        step_s = max(max(stage.decode_s, stage.send_decode_s) for stage in stages)
        steps = uniform_depth(len(stages)).max_in_flight(Phase.DECODE)
        work = plan.workload
        round_s = max(plan.decode_round_s, min(steps, work.batch) * step_s)
        return cls(
            way_s=sum(stage.prefill_s + stage.send_prefill_s for stage in stages) / prompts,
            prefill_s=slowest_s / prompts,
            decode_s=(work.new_tokens - 1) * round_s / work.batch,
        )

    @property
    def most_requests_per_s(self) -> float:
        """Arrivals that it takes at most, ``MAX_USE`` of what it computes."""
        return MAX_USE / (self.prefill_s + self.decode_s)

    def ttft_s(self, rate: float) -> float:
        """Return ``T(x)`` in seconds for at most :attr:`most_requests_per_s` arrivals a second."""
        free = 1 - rate * self.decode_s
        idle = free - rate * self.prefill_s
        return self.way_s / free + rate * self.prefill_s**2 / (2 * free * idle)

    def marginal_s(self, rate: float) -> float:
        """Return the derivative of ``x T(x)``."""
        p, d = self.prefill_s, self.decode_s
        free = 1 - rate * d
        idle = free - rate * p
        slope = self.way_s * d / free**2
        slope += p**2 / (2 * free * idle) * (1 + rate * d / free + rate * (p + d) / idle)
        return self.ttft_s(rate) + rate * slope

    def rate_at(self, marginal_s: float) -> float:
        """Return the arrivals a second at which the marginal time is this."""
        low, high = 0.0, self.most_requests_per_s
        if self.marginal_s(low) >= marginal_s:
            return low
        if self.marginal_s(high) <= marginal_s:
            return high
        for _ in range(STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.marginal_s(middle) < marginal_s else (low, middle)
        return (low + high) / 2


def split_arrivals(speeds: Sequence[ReplicaSpeed], rate: float) -> list[float]:
    """Return the arrivals a second of each replica with the least mean TTFT over all requests.

    Raises:
        InfeasibleError: the replicas together do not take ``rate`` requests a second.
    """
    most = sum(speed.most_requests_per_s for speed in speeds)
    if rate > most:
        raise InfeasibleError(
            f"the replicas answer {most:.4g} requests/s, expected at least {rate:.4g}"
        )
    low = min(speed.marginal_s(0.0) for speed in speeds)
    high = max(speed.marginal_s(speed.most_requests_per_s) for speed in speeds)
    for _ in range(STEPS):
        middle = (low + high) / 2
        is_low = sum(speed.rate_at(middle) for speed in speeds) < rate
        low, high = (middle, high) if is_low else (low, middle)
    found = [speed.rate_at(high) for speed in speeds]
    return [one * rate / sum(found) for one in found]


def mean_ttft_s(speeds: Sequence[ReplicaSpeed], rates: Sequence[float]) -> float:
    """Return the mean over all requests of replicas with these arrivals a second."""
    total_s = sum(one * speed.ttft_s(one) for speed, one in zip(speeds, rates, strict=True))
    return total_s / sum(rates)
