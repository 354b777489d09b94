"""How many bins multi-bin batching needs for a throughput (Sec. 4, Theorem 4.3).

One batch of ``B`` requests is served after the other, each as long as its longest answer takes. The
paper assumes service times that are uniform; here the lengths have any distribution, and a batch
whose longest answer has ``n`` tokens takes the seconds ``s(n)`` that the simulator plays for it. A
bin with the lengths ``[low, high)`` and the distribution ``G`` of them takes

    E[s(max)] = sum_n (G(n)^B - G(n - 1)^B) s(n)

a batch, and bins of shares ``p`` answer ``B / sum p E[s(max)]`` requests a second (Eq. 9). That is
the rate of an endless queue with known lengths; wrong predictions lower it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from llmpq.assigner.forecast import policy_of
from llmpq.assigner.schedules.plan import PERCENT, ScheduleRequest, check_lengths
from llmpq.batching.policies.multibin import DEFAULT_BINS
from llmpq.costmodel import ClusterCosts
from llmpq.errors import InfeasibleError
from llmpq.sim import simulate
from llmpq.sim.costs import PlanCosts
from llmpq.spec.plan import Plan, Schedule, ScheduleEstimate, default_schedule
from llmpq.spec.workload import LengthDistribution, TraceRequest
from llmpq.units import format_number

MAX_BINS = 256
_PLAYED = 12
"""Lengths of the longest answer for which a batch is played; between them seconds are linear."""
_ABOVE = 1e-9
"""A quantile is the shortest length that more than its share do not exceed."""


@dataclass(frozen=True)
class BinnedBatches:
    """Batches of one size, whose answers have lengths of the same bin.

    Attributes:
        lengths: of all answers.
        batch: requests of a batch.
        played: numbers of tokens, rising, and the seconds of a batch whose longest answer has them.
    """

    lengths: LengthDistribution
    batch: int
    played: tuple[tuple[int, float], ...]

    def boundaries(self, bins: int) -> tuple[float, ...]:
        """Return the lengths between bins of equal probability."""
        shares = (number / bins for number in range(1, bins))
        return tuple(float(self.lengths.quantile(share + _ABOVE)) for share in shares)

    def requests_per_s(self, boundaries: tuple[float, ...]) -> float:
        """Return the requests a second with bins between these lengths."""
        tokens = self.lengths.lengths
        edges = [0, *(bisect_left(tokens, edge) for edge in boundaries), len(tokens)]
        mean_s = 0.0
        for low, high in pairwise(edges):
            if low == high:
                continue
            shares = np.array(self.lengths.probabilities[low:high])
            below = np.cumsum(shares) / shares.sum()
            below[-1] = 1.0
            longest = np.diff(below**self.batch, prepend=0.0)
            mean_s += float(shares.sum() * (longest @ self._seconds[low:high]))
        return self.batch / mean_s

    def seconds(self, new_tokens: int) -> float:
        """Return the seconds of a batch whose longest answer has so many tokens."""
        tokens, seconds = zip(*self.played, strict=True)
        return float(np.interp(new_tokens, tokens, seconds))

    @cached_property
    def most_requests_per_s(self) -> float:
        """Requests a second of batches of equal answers, which no number of bins reaches."""
        return self.batch / float(np.array(self.lengths.probabilities) @ self._seconds)

    def bins_for(self, target: float) -> int:
        """Return the fewest bins of equal probability for a throughput, in requests a second.

        Raises:
            InfeasibleError: no number of bins reaches it.
        """
        for bins in range(1, min(MAX_BINS, len(self.lengths.lengths)) + 1):
            if self.requests_per_s(self.boundaries(bins)) >= target:
                return bins
        raise InfeasibleError(
            f"multi-bin batching: no number of bins answers {target:g} requests a second, batches "
            f"of {self.batch} equal answers {format_number(self.most_requests_per_s)}; plan for "
            "more sequences (--global_bz)"
        )

    @cached_property
    def _seconds(self) -> NDArray[np.float64]:
        tokens, seconds = zip(*self.played, strict=True)
        found: NDArray[np.float64] = np.interp(self.lengths.lengths, tokens, seconds)
        return found


def with_bins(
    plan: Plan,
    costs: ClusterCosts,
    request: ScheduleRequest,
    *,
    bins: int | None = None,
    target: float | None = None,
) -> Plan:
    """Return the plan with multi-bin batches as large as its slots.

    Args:
        plan: with the slots.
        costs: of its cluster.
        request: the distributions of lengths.
        bins: how many; ``None`` for the fewest that reach ``target``, or for ``DEFAULT_BINS``.
        target: throughput in requests a second.

    Raises:
        SpecError: the distributions hold lengths that the plan has no room for.
        InfeasibleError: no number of bins reaches the target.
    """
    check_lengths(plan, request)
    found = binned_batches(plan, costs, request)
    if bins is None:
        bins = DEFAULT_BINS if target is None else found.bins_for(target)
    boundaries = found.boundaries(bins)
    longest = request.new_tokens.quantile(PERCENT / 100)
    schedule = Schedule(
        policy="multibin",
        decode_batch=plan.workload.batch,
        boundaries=boundaries,
        estimate=ScheduleEstimate(
            requests_per_s=found.requests_per_s(boundaries),
            latency_s=found.seconds(longest),
            new_tokens=longest,
        ),
    )
    return replace(plan, schedule=schedule)


def binned_batches(plan: Plan, costs: ClusterCosts, request: ScheduleRequest) -> BinnedBatches:
    """Play full batches of a plan, with prompts of the mean length."""
    batch, tokens = plan.workload.batch, request.new_tokens.lengths
    grid = np.geomspace(tokens[0], tokens[-1], _PLAYED)
    chosen = sorted({tokens[0], tokens[-1], *(round(float(one)) for one in grid)})
    prices = PlanCosts(plan, costs, pads_prompts=request.pads_prompts)
    static = default_schedule("static", batch)
    prompt = max(1, round(request.prompt_tokens.mean))

    def batch_s(new_tokens: int) -> float:
        one = TraceRequest(arrival_s=0.0, prompt_tokens=prompt, new_tokens=new_tokens)
        return simulate(prices, policy_of(plan, static), [one] * batch, num_slots=batch).makespan_s

    return BinnedBatches(
        lengths=request.new_tokens,
        batch=batch,
        played=tuple((one, batch_s(one)) for one in chosen),
    )
