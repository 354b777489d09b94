"""Time one decoder layer of a model over a grid of shapes, at every bitwidth, in both phases.

The trials of all bitwidths are interleaved in a seeded random order and repeated in rounds, so that
a slow period of the host is spread over all points and no stage finds its weights in the cache. A
point is finished once the standard error of its median is small. Slow points are timed less often,
so that the time is that of the budget. No single slow timing counts: of two, the median is the
smaller one, and the run before the only timing of a point counts if it was faster.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from statistics import median, median_low, quantiles

import torch

from llmpq import __version__
from llmpq.dist.metrics.measurement import (
    CoreTime,
    TakenShare,
    busy_text,
    core_time,
    is_busy,
    provenance_line,
)
from llmpq.kernels.base import open_device
from llmpq.logging import get_logger
from llmpq.profiler.bench import (
    LONG_S,
    LayerBench,
    LayerJob,
    TimedStep,
    Timing,
    is_short,
    runs_of_timing,
)
from llmpq.profiler.journal import Journal
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample, LatencyTable

SPREAD_ROUNDS = 3
"""Timings of a point from which their spread counts."""
FINISHED_ROUNDS = 7
FINISHED_ERROR = 0.004
"""A median whose relative standard error is below this needs no further timing."""
DEEP_SHARE = 0.25
"""Share of the budget that starting the trials of many layers may take."""
REPEATS = 2
"""Runs of a short trial in each round: it varies more and costs little."""
NOISY_SPREAD = 0.1
"""Interquartile range over median, in the median over points, from which a host counts as noisy."""
OUTLIER = 1.5
"""How many times its median a timing exceeds to count as an outlier in the provenance."""
_LEAST_SHARE = 0.1

Progress = Callable[[float], None]
"""Receives the share of the work that is done, in [0, 1]."""
Times = Mapping[TimedStep, Sequence[float]]

logger = get_logger(__name__)


def profile_layer(
    job: LayerJob,
    progress: Progress | None = None,
    journal: Journal | None = None,
    now: Callable[[], float] = time.perf_counter,
    read_core: Callable[[int], CoreTime | None] = core_time,
) -> LatencyTable:
    """Measure the first decoder layers and the master's work; return medians.

    Records every timing in ``journal``, which may hold those of an interrupted run. ``now`` is the
    clock, in seconds; ``read_core`` returns the CPU time of a thread. Logs a warning if other
    programs took the CPU, if the timings vary by more than ``NOISY_SPREAD``, or if timing every
    point once takes more than the budget.

    Raises:
        SpecError: the grid does not fit the model's positions.
    """
    job = replace(job, device=open_device(job.device))
    bench = LayerBench(job, now)
    taken = TakenShare(read_core)
    rounds = _Rounds(bench, progress, journal)
    times = rounds.run()
    share = taken.share()
    layers_apart_s = {phase: _stage_s(times, phase) for phase in Phase}
    # A step that follows a wait or other work takes longer.
    stage_s = {
        phase: layers_apart_s[phase] + max(0.0, median(bench.first_run_s[phase] or [0.0]))
        for phase in Phase
    }
    several = [values for values in times.values() if len(values) >= SPREAD_ROUNDS]
    noise = median(spread_of(values) for values in several) if several else 0.0
    warn_if_noisy(noise, share)
    if rounds.first_s > job.budget_s and not is_busy(share):
        logger.warning(
            "timing every point once took %.3g s, more than the budget of %.3g s; measure fewer "
            "shapes or bitwidths",
            rounds.first_s,
            job.budget_s,
        )
    origin = _provenance(times, job, stage_s, noise)
    return LatencyTable(
        samples=_samples(times, layers_apart_s),
        provenance=origin if share is None else (*origin, provenance_line(share)),
    )


def job_identity(job: LayerJob) -> tuple[tuple[str, str], ...]:
    """Return the settings that timings depend on."""
    return (
        ("dtype", str(job.dtype).removeprefix("torch.")),
        (
            "layers timed in a row",
            ", ".join(f"{n} at {bits} bits" for bits, n in job.depths().items()),
        ),
        ("threads", str(torch.get_num_threads())),
        ("torch", torch.__version__),
        ("llmpq", __version__),
    )


def spread_of(values: Sequence[float]) -> float:
    """Return the interquartile range over the median; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, middle, high = quantiles(values, n=4)
    return (high - low) / middle


def outliers_of(values: Sequence[float]) -> list[float]:
    """Return the timings of a point above ``OUTLIER`` times its median."""
    most = OUTLIER * median_low(values)
    return [value for value in values if value > most]


def spread_line(noise: float) -> tuple[str, str]:
    """Return the provenance line that states a median spread."""
    return "noise", f"{noise:.1%} median interquartile range over median"


def warn_if_noisy(noise: float, taken: float | None = None) -> None:
    """Log a warning if others took CPU time, or if a median spread is above ``NOISY_SPREAD``."""
    again = "close other programs and measure again, with a larger --budget"
    if is_busy(taken):
        logger.warning("%s; %s", busy_text({"": taken}), again)
    elif noise > NOISY_SPREAD:
        logger.warning(
            "noisy host: the timings of a point vary by %.0f%% (interquartile range over median), "
            "expected at most %.0f%%; %s",
            100 * noise,
            100 * NOISY_SPREAD,
            again,
        )


class _Rounds:
    """Repeats all trials until they are finished or the time is spent.

    Every trial is first run once and timed once. Those of many layers are left out, the slowest
    first, where all of them would take more than ``DEEP_SHARE`` of the budget: few layers then give
    the time of a layer. In the rounds that follow, slow trials are left out when they do not fit.
    """

    def __init__(
        self, bench: LayerBench, progress: Progress | None, journal: Journal | None
    ) -> None:
        self.bench = bench
        self.progress = progress
        self.journal = journal
        self.begin = bench.now()
        self.first_s, self.shown = 0.0, 0.0
        self.groups = bench.trials()
        wanted = set(chain.from_iterable(self.groups))
        self.cost_s: dict[TimedStep, float] = {}
        self.times: dict[TimedStep, list[float]] = {}
        for one in () if journal is None else journal.timings:
            if one.trial in wanted or one.trial.is_master:
                self.times.setdefault(one.trial, []).append(one.seconds)

    @property
    def elapsed_s(self) -> float:
        """Seconds of the budget that are spent."""
        return self.bench.now() - self.begin

    def run(self) -> Times:
        budget_s = self.bench.job.budget_s
        shuffle = random.Random(self.bench.job.seed + sum(map(len, self.times.values())))
        shallow = [[one for one in group if not self._is_deep(one)] for group in self.groups]
        for trial in _interleaved(shallow, shuffle):
            self._start(trial)
        deep = self._affordable([one for group in self.groups for one in group])
        self.groups = [
            [one for one in group if one in deep or not self._is_deep(one)] for group in self.groups
        ]
        for trial in shuffle.sample(deep, len(deep)):
            self._start(trial)
        self.first_s = self.elapsed_s
        while left := self._left():
            for trial in _interleaved(left, shuffle):
                self._time(trial)
                if self.elapsed_s >= budget_s:
                    break
        return self.times

    def _is_deep(self, trial: TimedStep) -> bool:
        return trial.layers > self.bench.few

    def _affordable(self, trials: Sequence[TimedStep]) -> list[TimedStep]:
        """Return the deep trials whose preparation and first timing fit, cheapest first."""
        run_s = {}
        for one in trials:
            if one.layers == self.bench.few:
                depth = self.bench.depths[one.bits]
                run_s[replace(one, layers=depth)] = median_low(self.times[one]) * depth / one.layers
        kept: list[TimedStep] = []
        phases: set[Phase] = set()
        left_s = DEEP_SHARE * self.bench.job.budget_s
        for trial in sorted(filter(self._is_deep, trials), key=run_s.__getitem__):
            left_s -= run_s[trial] * (1 + runs_of_timing(trial, run_s[trial]))
            # The overhead of a stage needs one.
            if left_s >= 0.0 or trial.shape.phase not in phases:
                kept.append(trial)
                phases.add(trial.shape.phase)
        return kept

    def _left(self) -> list[list[TimedStep]]:
        """Return the trials of another round, one list per bitwidth; none when it is enough.

        Those with the fewest timings come first, up to ``SPREAD_ROUNDS``, then those that take the
        least time.
        """
        left_s = self.bench.job.budget_s - self.elapsed_s
        kept: set[TimedStep] = set()
        for trial in sorted(chain.from_iterable(self.groups), key=self._turn):
            round_s = self.cost_s[trial] * self._repeats(trial)
            if round_s < left_s and not self._is_finished(trial):
                left_s -= round_s
                kept.add(trial)
        groups = [
            [one for one in group if one in kept for _ in range(self._repeats(one))]
            for group in self.groups
        ]
        return [group for group in groups if group]

    def _turn(self, trial: TimedStep) -> tuple[int, float]:
        return min(len(self.times.get(trial, ())), SPREAD_ROUNDS), self.cost_s[trial]

    def _repeats(self, trial: TimedStep) -> int:
        return REPEATS if is_short(trial) and self.cost_s[trial] < LONG_S else 1

    def _is_finished(self, trial: TimedStep) -> bool:
        values = self.times.get(trial, ())
        if len(values) < FINISHED_ROUNDS:
            return False
        # Of a normal law: the median's error is 1.25 sigma / sqrt(n), the quartiles 1.35 sigma.
        return spread_of(values) / math.sqrt(len(values)) < FINISHED_ERROR

    def _start(self, trial: TimedStep) -> None:
        """Run a trial for the first time, then time it; compiling is not counted as spent.

        A first run is the slower one. Where it was faster than the only timing, other work on the
        host disturbed that, and both count.
        """
        before_s = self.bench.now()
        first = self.bench.prepare(trial)
        first_s = self.bench.now() - before_s
        self._time(trial)
        self._add([one for one in first if self._is_faster_than_only(one)])
        self.begin += max(0.0, first_s - self.cost_s[trial])

    def _is_faster_than_only(self, first: Timing) -> bool:
        kept = self.times[first.trial]
        return len(kept) == 1 and first.seconds < kept[0]

    def _time(self, trial: TimedStep) -> None:
        before_s = self.bench.now()
        timings = self.bench.run(trial)
        spent_s = self.bench.now() - before_s
        self.cost_s[trial] = min(spent_s, self.cost_s.get(trial, spent_s))
        self._add(timings)
        if self.progress is not None:
            # Compiling is taken out of what is spent once it is over: a share never shrinks.
            spent = min(1.0, self.elapsed_s / self.bench.job.budget_s)
            self.shown = max(self.shown, spent)
            self.progress(self.shown)

    def _add(self, timings: Sequence[Timing]) -> None:
        for one in timings:
            self.times.setdefault(one.trial, []).append(one.seconds)
        if self.journal is not None:
            self.journal.add(timings)


def _interleaved(groups: Sequence[Sequence[TimedStep]], shuffle: random.Random) -> list[TimedStep]:
    decks = [shuffle.sample(group, len(group)) for group in groups]
    shuffle.shuffle(decks)
    return [trial for hand in zip_longest(*decks) for trial in hand if trial is not None]


def _stage_s(times: Times, phase: Phase) -> float:
    """Return the seconds of a stage in addition to its layers, from trials at two depths."""
    depths: dict[tuple[object, int], dict[int, float]] = {}
    for trial, values in times.items():
        if not trial.is_master and trial.shape.phase is phase:
            depths.setdefault((trial.shape, trial.bits), {})[trial.layers] = median_low(values)
    found = []
    for seconds in depths.values():
        if len(seconds) == 2:
            (few, short_s), (more, long_s) = sorted(seconds.items())
            found.append((short_s * more - long_s * few) / (more - few))
    return max(0.0, median(found)) if found else 0.0


def _samples(times: Times, stage_s: Mapping[Phase, float]) -> tuple[LatencySample, ...]:
    """Return the seconds of one layer at every point, from the trials with the most layers."""
    deepest: dict[tuple[object, int], TimedStep] = {}
    for trial in sorted(times, key=lambda one: one.layers):
        deepest[trial.shape, trial.bits] = trial
    samples = []
    for trial in deepest.values():
        measured_s = seconds = median_low(times[trial])
        if not trial.is_master:
            rest = measured_s - stage_s[trial.shape.phase]
            seconds = max(rest, _LEAST_SHARE * measured_s) / trial.layers
        samples.append(
            LatencySample(
                phase=trial.shape.phase,
                bits=trial.bits,
                batch=trial.shape.batch,
                tokens=trial.shape.tokens,
                seconds=seconds,
            )
        )
    return tuple(
        sorted(samples, key=lambda one: (one.phase.value, one.bits, one.batch, one.tokens))
    )


def _provenance(
    times: Times, job: LayerJob, stage_s: Mapping[Phase, float], noise: float
) -> tuple[tuple[str, str], ...]:
    rounds = sorted(len(values) for values in times.values())
    outliers = [value for values in times.values() for value in outliers_of(values)]
    return (
        *job_identity(job),
        (
            "seconds of",
            "one decoder layer; rows of 0 bits are the master's own work, of -8 bits that with a "
            "head of 8 bits",
        ),
        ("stage_s", " ".join(f"{phase.value} {stage_s[phase]!r}" for phase in Phase)),
        (
            "rounds",
            f"{rounds[0]} to {rounds[-1]}, {sum(rounds)} timings, {len(outliers)} of them outliers",
        ),
        spread_line(noise),
        ("seed", str(job.seed)),
    )
