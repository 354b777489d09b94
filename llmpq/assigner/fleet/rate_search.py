"""The fleet with the least mean time to first token (TTFT) at a rate of arrivals.

Parts, batches and their plans are those of the search for the most requests a second. Every replica
takes a share of the arrivals, and its TTFT grows with it (:func:`mean_ttft_s`). Which replicas form
the fleet, and their shares, is a mixed-integer program with a convex objective. It is solved by
outer approximation (Duran and Grossmann, 1986): an integer program bounds ``x T(x)`` from below by
tangents, its fleet gets its best shares, and tangents are added there, until both agree.

The TTFT of replicas that share arrivals follows from the forecasts of their plans. A replica
computes prompts in order of arrival while other sequences decode. A prompt takes ``w`` seconds on
its way through all stages and ``p`` seconds of the slowest stage; the other tokens of a request
take ``d`` seconds of it. With ``x`` requests a second, ``1 - x d`` of the time is left for prompts,
which wait as in a queue of constant service time and random arrivals (M/D/1, Pollaczek-Khinchine)::

    T(x) = w / (1 - x d) + x p^2 / (2 (1 - x d) (1 - x (p + d)))

``x T(x)`` is convex, so that the best shares of several replicas have equal marginal times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmpq.assigner.fleet.partition import DeviceCounts
from llmpq.assigner.fleet.search import TYPES_UNTIL, FleetPlan, FleetSearch
from llmpq.assigner.milp.solvers import MixedProgram, solve
from llmpq.assigner.objective import relative_gap
from llmpq.assigner.request import GAP_ROUNDING, PlanRequest, Progress
from llmpq.batching import uniform_depth
from llmpq.errors import InfeasibleError
from llmpq.spec.plan import OtherCut, Plan
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


USES = (0.0, 0.3, 0.6, 0.8, 0.9, 0.95, 1.0)
"""Tangents of the first program, as shares of the most arrivals."""
AGREED = 1e-6
"""Relative gap below which bound and fleet count as equal."""


@dataclass(frozen=True, slots=True)
class Shares:
    """A fleet with its arrivals.

    Attributes:
        columns: of the replicas.
        rates: arrivals a second of each.
        ttft_s: mean over all requests.
        bound_s: no fleet of the same columns has less.
    """

    columns: tuple[int, ...]
    rates: tuple[float, ...]
    ttft_s: float
    bound_s: float


class RateSearch(FleetSearch):
    """Chooses the parts, batches and shares of arrivals with the least TTFT, its value one over it.

    Args:
        request: to plan.
        number: of replicas, ``None`` for the best.
        rate: arrivals a second.
        progress: as of ``plan_fleet``.
    """

    def __init__(
        self, request: PlanRequest, number: int | None, rate: float, progress: Progress
    ) -> None:
        super().__init__(request, number, progress)
        self._arrivals = rate
        self._most_requests = self.bound
        self._speeds: dict[int, ReplicaSpeed] = {}
        self._speeds_of_equal: dict[tuple[str, int], ReplicaSpeed] = {}
        self._shares: Shares | None = None

    def run(self) -> None:
        """Plan all parts, or as many as there is time for, and choose the best fleet."""
        self.price_first()
        places = list(range(len(self._columns)))
        if not self._is_complete:
            self._improve(TYPES_UNTIL)
            parts = dict.fromkeys(part for part, _ in self._columns)
            places = self._near_share(sorted(parts, key=sum))
        for place in places:
            self._price(place)
            self._price(place)  # where the first search was ended
        self._shares = found = self._best()
        fastest_s = self._pricer.fastest_prompt_s()
        if self._is_proven():
            self.bound = 0.0 if found is None else 1 / found.bound_s
        else:
            self.bound = 1 / fastest_s if fastest_s else 0.0
        # The search for the most requests a second left its own.
        self.fleet, self.value = (), 0.0
        if found is not None:
            self.fleet = tuple(self._columns[place] for place in found.columns)
            self.value = 1 / found.ttft_s

    def _is_proven(self) -> bool:
        """Whether the columns are all there are, each with its best plan."""
        if not self._is_complete:
            return False
        return bool(((self._is_priced & self._is_known()) | (self._upper <= 0)).all())

    def _speed(self, place: int) -> ReplicaSpeed:
        """Return the speed of a column that holds the model."""
        if place not in self._speeds:
            part, size = self._columns[place]
            key = self._pools.key(part), size
            if key not in self._speeds_of_equal:
                plan = self._pricer.plan(part, size, command="")
                self._speeds_of_equal[key] = ReplicaSpeed.of(plan)
            self._speeds[place] = self._speeds_of_equal[key]
        return self._speeds[place]

    def _known(self) -> list[int]:
        """Return the columns that have a plan."""
        return [int(place) for place in np.flatnonzero(self._lower > 0)]

    def _best(self, parts: Sequence[DeviceCounts] | None = None) -> Shares | None:
        """Return the best fleet of these parts; ``None`` where none answers all arrivals."""
        places = self._known()
        if parts is not None:
            places = [place for place in places if self._columns[place][0] in parts]
        places = self._undominated(places)
        tangents = [
            (place, use * self._speed(place).most_requests_per_s)
            for place in places
            for use in USES
        ]
        best: Shares | None = None
        bound_s = 0.0
        seen: set[tuple[int, ...]] = set()
        while places:
            chosen, asked, found_s = self._choose(places, tangents, parts)
            if not chosen:
                return best
            bound_s = max(bound_s, found_s)
            speeds = [self._speed(place) for place in chosen]
            rates = split_arrivals(speeds, self._arrivals)
            ttft_s = mean_ttft_s(speeds, rates)
            if best is None or ttft_s < best.ttft_s:
                best = self._shares_of(chosen, rates, ttft_s)
            if best.ttft_s - bound_s <= AGREED * best.ttft_s:
                return replace(best, bound_s=best.ttft_s)
            if chosen in seen:  # rounding in the solver
                return replace(best, bound_s=bound_s)
            seen.add(chosen)
            tangents += [*zip(chosen, rates, strict=True), *asked]
        return best

    def _shares_of(self, chosen: Sequence[int], rates: Sequence[float], ttft_s: float) -> Shares:
        """Return a fleet without replicas that get no arrivals, unless their number is given."""
        used = [
            (place, rate)
            for place, rate in zip(chosen, rates, strict=True)
            if rate > 0 or self._number is not None
        ]
        columns, own = zip(*used, strict=True)
        return Shares(columns, own, ttft_s, 0.0)

    def _choose(
        self,
        places: Sequence[int],
        tangents: Sequence[tuple[int, float]],
        parts: Sequence[DeviceCounts] | None,
    ) -> tuple[tuple[int, ...], list[tuple[int, float]], float]:
        """Return the best fleet by tangents, the arrivals of each replica, and a bound of the TTFT.

        A column that is taken several times has equal replicas, which have equal shares.
        """
        program = MixedProgram()
        taken = {place: program.variable(0, self._most(place), is_whole=True) for place in places}
        rates = {place: program.variable(0) for place in places}
        waits = {place: program.variable(0) for place in places}
        program.minimise((wait, 1.0) for wait in waits.values())
        program.constrain(((rate, 1.0) for rate in rates.values()), "==", self._arrivals)
        for place in places:
            most = self._speed(place).most_requests_per_s
            program.constrain([(rates[place], 1.0), (taken[place], -most)], "<=", 0.0)
        for place, rate in tangents:
            speed = self._speed(place)
            slope = speed.marginal_s(rate)
            rest = rate * (speed.ttft_s(rate) - slope)
            terms = [(waits[place], 1.0), (rates[place], -slope), (taken[place], -rest)]
            program.constrain(terms, ">=", 0.0)
        self._limit(program, taken, has_number=parts is None)
        found = solve(program, "highs", gap=0.0, time_limit_s=None)
        if not found.values:
            return (), [], found.bound / self._arrivals
        counts = {place: round(found.values[taken[place]]) for place in places}
        chosen = tuple(place for place in places for _ in range(counts[place]))
        asked = [
            (place, min(most, max(0.0, found.values[rates[place]] / counts[place])))
            for place in dict.fromkeys(chosen)
            for most in (self._speed(place).most_requests_per_s,)
        ]
        return chosen, asked, found.bound / self._arrivals

    def _limit(self, program: MixedProgram, taken: Mapping[int, int], *, has_number: bool) -> None:
        """Limit how often columns are taken: by devices, cores, sequences and the number wanted."""
        for shares in self._core_shares.T:
            own = [(one, float(shares[place])) for place, one in taken.items() if shares[place]]
            if own:
                program.constrain(own, "<=", 1.0)
        for pool, count in enumerate(self._pools.counts):
            used = [(one, float(self._counts[place, pool])) for place, one in taken.items()]
            program.constrain(used, "<=", count)
        sequences = [(one, float(self._columns[place][1])) for place, one in taken.items()]
        program.constrain(sequences, "<=", self._batches[0])
        if self._number is not None and has_number:
            program.constrain(((one, 1.0) for one in taken.values()), "==", self._number)

    def _most(self, place: int) -> int:
        part, size = self._columns[place]
        each = [whole // own for whole, own in zip(self._pools.counts, part, strict=True) if own]
        return min([*each, self._batches[0] // size])

    def _undominated(self, places: Sequence[int]) -> list[int]:
        """Leave out columns that have more devices than another one and are no faster."""
        rows = np.array(
            [
                (
                    *self._counts[place],
                    self._columns[place][1],
                    one.way_s,
                    one.prefill_s,
                    one.decode_s,
                )
                for place in places
                for one in (self._speed(place),)
            ]
        )
        kept: list[int] = []
        kept_rows: list[int] = []
        # Better columns first: of equal ones, one is left.
        for at in np.lexsort(rows.T[::-1]) if len(places) else ():
            if not (rows[kept_rows] <= rows[at]).all(axis=1).any():
                kept.append(places[at])
                kept_rows.append(int(at))
        return sorted(kept)

    def most_arrivals(self) -> float:
        """Return the most arrivals a second of any fleet that was found, 0 without one."""
        values = np.zeros(len(self._columns))
        for place in self._known():
            values[place] = self._speed(place).most_requests_per_s
        return float(values[self._pack(values)[0]].sum())

    def result(self, bound: float, command: str) -> FleetPlan:
        """Return the best fleet with its plans, its arrivals and its TTFT."""
        assert self._shares is not None
        found = super().result(self._most_requests, command)
        rates = dict(zip(self.fleet, self._shares.rates, strict=True))
        gap = relative_gap(bound, self.value)
        return replace(
            found,
            replicas=tuple(
                replace(replica, arrivals_per_s=rates[key])
                for key, replica in zip(self.ordered(), found.replicas, strict=True)
            ),
            gap=gap,
            status="optimal" if gap <= GAP_ROUNDING else "feasible",
            ttft_s=self._shares.ttft_s,
            ttft_bound_s=min(1 / bound, self._shares.ttft_s),
        )

    def _other(self, name: str, parts: list[DeviceCounts]) -> OtherCut:
        found = super()._other(name, parts)
        best = self._best(parts)
        if best is None:
            return found
        return replace(found, replicas=len(best.columns), ttft_s=best.ttft_s)
