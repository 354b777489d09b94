"""Time one decoder layer of a model over a grid of shapes, at every bitwidth, in both phases.

The trials of all bitwidths are dealt in turn in a seeded random order and repeated in rounds: a
slow minute of a shared machine spoils no single point, and no stage finds its own weights in the
cache because it ran just before. Timings on a disturbed core are told from those on a calm one and
brought to its level (``profiler.levels``). A point is settled once the error of its median is
small; from then on the time left goes to the others. A run sums up thousands of steps, disturbed
ones too, so its latency follows their mean: the table holds medians of the calm level, the
steadiest estimate, times how far all timings of a phase, disturbed ones too, are above their
medians in the mean (``slack`` in the provenance), more where trials suffer more. It also tells the
noise, and how far the level differs between spans of two seconds (``drift``), by which bounds are
guarded.

How much longer everything takes beside other workers (``company`` in the provenance) is measured
in pairs, with and without them.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from statistics import mean, median, quantiles, stdev

import torch

from llmpq import __version__
from llmpq.profiler.bench import MASTER_BITS, Bench, LayerJob, Timing, Trial, is_short
from llmpq.profiler.company import Company
from llmpq.profiler.journal import Journal
from llmpq.profiler.levels import Levels, Timed, levels_of
from llmpq.profiler.reference import DISTURBED, reference_s
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample, LatencyTable

MIN_ROUNDS = 3
SETTLED_ROUNDS = 7
SETTLED_ERROR = 0.004
"""A median whose standard error is below this share needs no further timing."""
REPEATS = 2
"""Times that a short trial is dealt in each round: it is noisier, and costs little."""
COMPANY_SHAPES = 5
COMPANY_SHARE = 0.25
"""Of the budget, for the pairs with and without companions."""
COMPANY_PAUSE_S = 0.004
"""How long companions that were just let go or stopped take to make a difference."""
DRIFT_SPAN_S = 2.0
DRIFT_TIMINGS = 5
"""A span with fewer timings says nothing of its level."""
_LEAST_SHARE = 0.1

Progress = Callable[[float], None]
"""Told the share of the work that is done, in [0, 1]."""
Times = Mapping[Trial, Sequence[float]]


def profile_layer(
    job: LayerJob, progress: Progress | None = None, journal: Journal | None = None
) -> LatencyTable:
    """Measure the first decoder layers and the master's work; return what a run meets in the mean.

    Args:
        job: what to measure.
        progress: told how far it is.
        journal: keeps every timing, and may bring those of an interrupted run.

    Raises:
        SpecError: the grid does not fit the model's positions.
    """
    bench = Bench(job)
    rounds = _Rounds(bench, progress, journal)
    times = rounds.run()
    slack = {phase: rounds.slack(phase) for phase in Phase}
    skew = {phase: slack[phase] / rounds.usual_level(phase) for phase in Phase}
    warm_s = {phase: _stage_s(times, phase) for phase in Phase}
    stage_s = {phase: slack[phase] * (warm_s[phase] + _cold_s(bench, phase)) for phase in Phase}
    return LatencyTable(
        samples=_samples(
            times, warm_s, lambda one: skew[one.shape.phase] * rounds.levels.level(one)
        ),
        provenance=(
            *_provenance(times, job, bench.depth, stage_s),
            ("reference_s", f"{rounds.levels.calm_s:.6f}"),
            *rounds.drift(),
            ("slack", _by_phase(slack)),
            ("disturbed", _by_phase({phase: rounds.levels.factor(phase) for phase in Phase})),
            ("disturbed share", f"{rounds.levels.disturbed_share:.0%} of the timings"),
            *_slowdowns(rounds.levels),
            *_company(bench, times),
        ),
    )


def job_identity(job: LayerJob) -> tuple[tuple[str, str], ...]:
    """Return what timings depend on and a table's reader may want to know."""
    return (
        ("dtype", str(job.dtype).removeprefix("torch.")),
        ("layers timed in a row", str(job.layers)),
        ("threads", str(torch.get_num_threads())),
        ("torch", torch.__version__),
        ("llmpq", __version__),
    )


class _Rounds:
    """Repeats all trials until they are settled or the time is spent."""

    def __init__(self, bench: Bench, progress: Progress | None, journal: Journal | None) -> None:
        self.bench = bench
        self.progress = progress
        self.journal = journal
        self.told = 0.0
        self.by_span: dict[int, list[Timing]] = {}
        self.start_s = 0.0
        self.groups = bench.trials()
        wanted = set(chain.from_iterable(self.groups))
        self.timed: list[Timed] = [
            one
            for one in (() if journal is None else journal.timed)
            if one.timing.trial in wanted or one.timing.trial.bits == MASTER_BITS
        ]
        self.levels = levels_of(self.timed)

    def run(self) -> Times:
        for trial in chain.from_iterable(self.groups):
            self.bench.run(trial)  # first calls allocate, compile and choose kernels
        for first in self.bench.cold_s.values():
            first.clear()
        shuffle = random.Random(self.bench.job.seed + len(self.timed))
        start = self.start_s = time.perf_counter()
        while left := self._left(time.perf_counter() - start):
            order = _dealt([_weighted(group) for group in left], shuffle)
            for number, trial in enumerate(order, start=1):
                self._time(trial)
                self._tell(time.perf_counter() - start, number / len(order))
            self.levels = levels_of(self.timed)
        self._start_cold()
        return self.levels.times

    def _start_cold(self) -> None:
        """Have a first run of either phase timed, should the journal have brought all the rest."""
        short = [trial for trial in chain.from_iterable(self.groups) if is_short(trial)]
        for phase, found in self.bench.cold_s.items():
            own = (trial for trial in short if trial.shape.phase is phase)
            trial = min(own, key=lambda one: one.layers, default=None)
            if not found and trial is not None:
                self.bench.run(trial)

    def _left(self, elapsed_s: float) -> list[list[Trial]]:
        """Return the trials of another round, one list a bitwidth; none when it is enough."""
        counts = {trial: len(self.levels.times.get(trial, ())) for trial in chain(*self.groups)}
        if elapsed_s < self.bench.job.budget_s:
            return self._keep(lambda trial: not self._is_settled(trial))
        return self._keep(lambda trial: counts[trial] < MIN_ROUNDS)

    def _keep(self, wanted: Callable[[Trial], bool]) -> list[list[Trial]]:
        kept = [[trial for trial in group if wanted(trial)] for group in self.groups]
        return [group for group in kept if group]

    def _is_settled(self, trial: Trial) -> bool:
        values = self.levels.times.get(trial, [])
        if len(values) < SETTLED_ROUNDS:
            return False
        # Of a normal law: the median's error is 1.25 sigma / sqrt(n), the quartiles 1.35 sigma.
        return _spread(values) / math.sqrt(len(values)) < SETTLED_ERROR

    def _time(self, trial: Trial) -> None:
        before_s = reference_s()
        timings: list[Timing] = self.bench.run(trial)
        span = int((time.perf_counter() - self.start_s) / DRIFT_SPAN_S)
        self.by_span.setdefault(span, []).extend(timings)
        after_s = reference_s()
        timed = [Timed(timing=one, before_s=before_s, after_s=after_s) for one in timings]
        self.timed += timed
        if self.journal is not None:
            self.journal.add(timed)

    def slack(self, phase: Phase) -> float:
        """Return how far all timings of layers in a phase are above the median of the calm."""
        ratios = self._ratios(
            one.timing for one in self.timed if one.timing.trial.shape.phase is phase
        )
        return mean(ratios) if ratios else 1.0

    def usual_level(self, phase: Phase) -> float:
        """Return how far layers were above the calm level in a phase, in the mean."""
        trials = (one.timing.trial for one in self.timed)
        own = (t for t in trials if t.shape.phase is phase and t.bits != MASTER_BITS)
        levels = [self.levels.level(trial) for trial in own]
        return mean(levels) if levels else 1.0

    def drift(self) -> tuple[tuple[str, str], ...]:
        """Return the standard deviation of the level between spans, as provenance.

        Nothing where there are too few spans to tell.
        """
        levels = []
        for timed in self.by_span.values():
            ratios = self._ratios(timed)
            if len(ratios) >= DRIFT_TIMINGS:
                levels.append(mean(ratios))
        if len(levels) < 2:
            return ()
        return (("drift", f"{stdev(levels):.4f}"),)

    def _ratios(self, timings: Iterable[Timing]) -> list[float]:
        """Return how many times the median of their trials those of layers took."""
        medians: dict[Trial, float] = {}
        found = []
        for one in timings:
            trial = one.trial
            if trial.bits == MASTER_BITS:
                continue
            if trial not in medians:
                medians[trial] = median(self.levels.times[trial])
            found.append(one.seconds / medians[trial])
        return found

    def _tell(self, elapsed_s: float, share_of_round: float) -> None:
        if self.progress is None:
            return
        rounds = min((len(values) for values in self.levels.times.values()), default=0)
        least = (min(rounds, MIN_ROUNDS) + share_of_round) / (MIN_ROUNDS + 1)
        share = min(1.0, elapsed_s / self.bench.job.budget_s, least)
        self.told = max(self.told, share)
        self.progress(self.told)


def _dealt(groups: Sequence[Sequence[Trial]], shuffle: random.Random) -> list[Trial]:
    """Return all trials, shuffled within their bitwidth and dealt from the bitwidths in turn."""
    decks = [shuffle.sample(group, len(group)) for group in groups]
    shuffle.shuffle(decks)
    return [trial for hand in zip_longest(*decks) for trial in hand if trial is not None]


def _weighted(group: Sequence[Trial]) -> list[Trial]:
    """Return the trials of a bitwidth as often as they are dealt in one round."""
    return [trial for trial in group for _ in range(REPEATS if is_short(trial) else 1)]


def _company(bench: Bench, times: Times) -> tuple[tuple[str, str], ...]:
    """Return how much longer trials take with companions than without, as provenance."""
    job = bench.job
    if not job.companions:
        return ()
    trials = {phase: _spread_out(times, phase) for phase in Phase}
    pairs: dict[Trial, list[tuple[float, float]]] = {}
    company = Company(job, job.companions)
    try:
        start = time.perf_counter()
        while not pairs or time.perf_counter() - start < COMPANY_SHARE * job.budget_s:
            for trial in chain(*trials.values()):
                pairs.setdefault(trial, []).append(_pair(bench, trial, company))
    finally:
        company.close()
    # A pair on a disturbed core says little of company, unless its trial has no other.
    calm_s = DISTURBED * min(worst_s for own in pairs.values() for worst_s, _ in own)
    ratios = {
        trial: [ratio for worst_s, ratio in own if worst_s < calm_s] or [ratio for _, ratio in own]
        for trial, own in pairs.items()
    }
    found = {phase: max(1.0, mean(median(ratios[t]) for t in trials[phase])) for phase in Phase}
    count = len(next(iter(pairs.values())))
    return (
        ("company", _by_phase(found)),
        ("companions", f"{len(job.companions)}, {count} pairs of {len(pairs)} trials"),
    )


def _pair(bench: Bench, trial: Trial, company: Company) -> tuple[float, float]:
    """Return the slower reference around a pair, and how many times as long the company made it."""
    before_s = reference_s()
    alone_s = _timed(bench, trial)
    with company:
        beside_s = _timed(bench, trial)
    again_s = _timed(bench, trial)
    return max(before_s, reference_s()), 2.0 * beside_s / (alone_s + again_s)


def _slowdowns(levels: Levels) -> tuple[tuple[str, str], ...]:
    """Return by rows how many times as long everything takes when disturbed, as provenance."""
    return tuple(
        (
            f"disturbed {phase.value} {bits or 'master'}",
            " ".join(f"{rows} {factor:.3f}" for rows, factor in slowdown.by_rows),
        )
        for (phase, bits), slowdown in sorted(levels.slowdowns.items())
    )


def _by_phase(values: Mapping[Phase, float]) -> str:
    return " ".join(f"{phase.value} {values[phase]:.4f}" for phase in Phase)


def _timed(bench: Bench, trial: Trial) -> float:
    time.sleep(COMPANY_PAUSE_S)
    return bench.run(trial)[0].seconds


def _spread_out(times: Times, phase: Phase) -> list[Trial]:
    """Return a few trials of every bitwidth, from the shortest to the longest."""
    found: list[Trial] = []
    for bits in sorted({trial.bits for trial in times} - {MASTER_BITS}):
        own = [trial for trial in times if (trial.shape.phase, trial.bits) == (phase, bits)]
        own.sort(key=lambda trial: median(times[trial]))
        last = len(own) - 1
        places = {round(last * step / COMPANY_SHAPES) for step in range(1, COMPANY_SHAPES)}
        found += [own[place] for place in sorted(places)]
    return found


def _stage_s(times: Times, phase: Phase) -> float:
    """Return what a stage takes apart from its layers, from trials at two depths."""
    depths: dict[tuple[object, int], dict[int, float]] = {}
    for trial, values in times.items():
        if trial.bits != MASTER_BITS and trial.shape.phase is phase:
            depths.setdefault((trial.shape, trial.bits), {})[trial.layers] = median(values)
    found = []
    for seconds in depths.values():
        if len(seconds) == 2:
            (few, short_s), (more, long_s) = sorted(seconds.items())
            found.append((short_s * more - long_s * few) / (more - few))
    return max(0.0, median(found)) if found else 0.0


def _cold_s(bench: Bench, phase: Phase) -> float:
    """Return what a stage pays at each step for having waited, or done something else."""
    found = bench.cold_s[phase]
    return max(0.0, median(found)) if found else 0.0


def _samples(
    times: Times, stage_s: Mapping[Phase, float], slack_of: Callable[[Trial], float]
) -> tuple[LatencySample, ...]:
    deepest: dict[tuple[object, int], tuple[Trial, float]] = {}
    for trial, values in times.items():
        key = trial.shape, trial.bits
        if key not in deepest or trial.layers > deepest[key][0].layers:
            deepest[key] = trial, median(values)
    samples = []
    for trial, measured_s in deepest.values():
        seconds = measured_s
        if trial.bits != MASTER_BITS:
            rest = measured_s - stage_s[trial.shape.phase]
            seconds = max(rest, _LEAST_SHARE * measured_s) / trial.layers
        samples.append(
            LatencySample(
                phase=trial.shape.phase,
                bits=trial.bits,
                batch=trial.shape.batch,
                tokens=trial.shape.tokens,
                seconds=slack_of(trial) * seconds,
            )
        )
    return tuple(
        sorted(samples, key=lambda one: (one.phase.value, one.bits, one.batch, one.tokens))
    )


def _provenance(
    times: Times, job: LayerJob, depth: int, stage_s: Mapping[Phase, float]
) -> tuple[tuple[str, str], ...]:
    rounds = sorted(len(values) for values in times.values())
    noise = median(_spread(values) for values in times.values())
    own_s = " ".join(f"{phase.value} {stage_s[phase]!r}" for phase in Phase)
    return (
        *job_identity(job),
        ("seconds of", "one decoder layer; rows of 0 bits are the master's own work"),
        ("depth", str(depth)),
        ("stage_s", own_s),
        ("rounds", f"{rounds[0]} to {rounds[-1]}, {sum(rounds)} timings"),
        ("noise", f"{noise:.1%} median interquartile range over median"),
        ("seed", str(job.seed)),
    )


def _spread(values: Sequence[float]) -> float:
    """Return the interquartile range over the median."""
    if len(values) < 2:
        return 0.0
    low, middle, high = quantiles(values, n=4)
    return (high - low) / middle
