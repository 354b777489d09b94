"""Time one decoder layer of a model over a grid of shapes, at every bitwidth, in both phases.

The trials of all bitwidths are interleaved in a seeded random order and repeated in rounds, so that
a slow period of the host is spread over all points and no stage finds its weights in the cache. A
point is finished once the standard error of its median is small.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from statistics import median, quantiles

import torch

from llmpq import __version__
from llmpq.kernels.gpu.device import open_device
from llmpq.logging import get_logger
from llmpq.profiler.bench import Bench, LayerJob, Trial, is_short
from llmpq.profiler.journal import Journal
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample, LatencyTable

MIN_ROUNDS = 3
FINISHED_ROUNDS = 7
FINISHED_ERROR = 0.004
"""A median whose relative standard error is below this needs no further timing."""
REPEATS = 2
"""Runs of a short trial in each round: it varies more and costs little."""
NOISY_SPREAD = 0.1
"""Interquartile range over median, in the median over points, from which a host counts as noisy."""
_LEAST_SHARE = 0.1

Progress = Callable[[float], None]
"""Receives the share of the work that is done, in [0, 1]."""
Times = Mapping[Trial, Sequence[float]]

logger = get_logger(__name__)


def profile_layer(
    job: LayerJob, progress: Progress | None = None, journal: Journal | None = None
) -> LatencyTable:
    """Measure the first decoder layers and the master's work; return medians.

    Records every timing in ``journal``, which may hold those of an interrupted run. Logs a warning
    if the timings vary by more than ``NOISY_SPREAD``.

    Raises:
        SpecError: the grid does not fit the model's positions.
    """
    job = replace(job, device=open_device(job.device))
    bench = Bench(job)
    times = _Rounds(bench, progress, journal).run()
    layers_apart_s = {phase: _stage_s(times, phase) for phase in Phase}
    # A step that follows a wait or other work takes longer.
    stage_s = {
        phase: layers_apart_s[phase] + max(0.0, median(bench.first_run_s[phase] or [0.0]))
        for phase in Phase
    }
    noise = median(spread_of(values) for values in times.values())
    warn_if_noisy(noise)
    return LatencyTable(
        samples=_samples(times, layers_apart_s),
        provenance=_provenance(times, job, bench.depth, stage_s, noise),
    )


def job_identity(job: LayerJob) -> tuple[tuple[str, str], ...]:
    """Return the settings that timings depend on."""
    return (
        ("dtype", str(job.dtype).removeprefix("torch.")),
        ("layers timed in a row", str(job.layers)),
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


def spread_line(noise: float) -> tuple[str, str]:
    """Return the provenance line that states a median spread."""
    return "noise", f"{noise:.1%} median interquartile range over median"


def warn_if_noisy(noise: float) -> None:
    """Log a warning if a median spread is above ``NOISY_SPREAD``."""
    if noise > NOISY_SPREAD:
        logger.warning(
            "noisy host: the timings of a point vary by %.0f%% (interquartile range over median), "
            "expected at most %.0f%%; close other programs and measure again, with a larger "
            "--budget",
            100 * noise,
            100 * NOISY_SPREAD,
        )


class _Rounds:
    """Repeats all trials until they are finished or the time is spent."""

    def __init__(self, bench: Bench, progress: Progress | None, journal: Journal | None) -> None:
        self.bench = bench
        self.progress = progress
        self.journal = journal
        self.reported = 0.0
        self.groups = bench.trials()
        wanted = set(chain.from_iterable(self.groups))
        self.times: dict[Trial, list[float]] = {}
        for one in () if journal is None else journal.timings:
            if one.trial in wanted or one.trial.is_master:
                self.times.setdefault(one.trial, []).append(one.seconds)

    def run(self) -> Times:
        for trial in chain.from_iterable(self.groups):
            self.bench.run(trial)  # first calls allocate, compile and choose kernels
            if self.progress is not None:
                self.progress(0.0)
        for first in self.bench.first_run_s.values():
            first.clear()
        shuffle = random.Random(self.bench.job.seed + sum(map(len, self.times.values())))
        start = time.perf_counter()
        # A resumed run that lacks nothing makes one round, which times first runs.
        left = self._left(0.0) or self.groups
        while left:
            order = _interleaved([_repeated(group) for group in left], shuffle)
            for number, trial in enumerate(order, start=1):
                self._time(trial)
                self._report(time.perf_counter() - start, number / len(order))
            left = self._left(time.perf_counter() - start)
        return self.times

    def _left(self, elapsed_s: float) -> list[list[Trial]]:
        """Return the trials of another round, one list per bitwidth; none when it is enough."""

        def is_wanted(trial: Trial) -> bool:
            if elapsed_s < self.bench.job.budget_s:
                return not self._is_finished(trial)
            return len(self.times.get(trial, ())) < MIN_ROUNDS

        kept = [[trial for trial in group if is_wanted(trial)] for group in self.groups]
        return [group for group in kept if group]

    def _is_finished(self, trial: Trial) -> bool:
        values = self.times.get(trial, ())
        if len(values) < FINISHED_ROUNDS:
            return False
        # Of a normal law: the median's error is 1.25 sigma / sqrt(n), the quartiles 1.35 sigma.
        return spread_of(values) / math.sqrt(len(values)) < FINISHED_ERROR

    def _time(self, trial: Trial) -> None:
        timings = self.bench.run(trial)
        for one in timings:
            self.times.setdefault(one.trial, []).append(one.seconds)
        if self.journal is not None:
            self.journal.add(timings)

    def _report(self, elapsed_s: float, share_of_round: float) -> None:
        if self.progress is None:
            return
        rounds = min((len(values) for values in self.times.values()), default=0)
        least = (min(rounds, MIN_ROUNDS) + share_of_round) / (MIN_ROUNDS + 1)
        share = min(1.0, elapsed_s / self.bench.job.budget_s, least)
        self.reported = max(self.reported, share)
        self.progress(self.reported)


def _interleaved(groups: Sequence[Sequence[Trial]], shuffle: random.Random) -> list[Trial]:
    decks = [shuffle.sample(group, len(group)) for group in groups]
    shuffle.shuffle(decks)
    return [trial for hand in zip_longest(*decks) for trial in hand if trial is not None]


def _repeated(group: Sequence[Trial]) -> list[Trial]:
    """Return the trials of a bitwidth as often as they run in one round."""
    return [trial for trial in group for _ in range(REPEATS if is_short(trial) else 1)]


def _stage_s(times: Times, phase: Phase) -> float:
    """Return the seconds of a stage in addition to its layers, from trials at two depths."""
    depths: dict[tuple[object, int], dict[int, float]] = {}
    for trial, values in times.items():
        if not trial.is_master and trial.shape.phase is phase:
            depths.setdefault((trial.shape, trial.bits), {})[trial.layers] = median(values)
    found = []
    for seconds in depths.values():
        if len(seconds) == 2:
            (few, short_s), (more, long_s) = sorted(seconds.items())
            found.append((short_s * more - long_s * few) / (more - few))
    return max(0.0, median(found)) if found else 0.0


def _samples(times: Times, stage_s: Mapping[Phase, float]) -> tuple[LatencySample, ...]:
    """Return the seconds of one layer at every point, from the trials with the most layers."""
    deepest: dict[tuple[object, int], Trial] = {}
    for trial in sorted(times, key=lambda one: one.layers):
        deepest[trial.shape, trial.bits] = trial
    samples = []
    for trial in deepest.values():
        measured_s = seconds = median(times[trial])
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
    times: Times, job: LayerJob, depth: int, stage_s: Mapping[Phase, float], noise: float
) -> tuple[tuple[str, str], ...]:
    rounds = sorted(len(values) for values in times.values())
    return (
        *job_identity(job),
        (
            "seconds of",
            "one decoder layer; rows of 0 bits are the master's own work, of -8 bits that with a "
            "head of 8 bits",
        ),
        ("depth", str(depth)),
        ("stage_s", " ".join(f"{phase.value} {stage_s[phase]!r}" for phase in Phase)),
        ("rounds", f"{rounds[0]} to {rounds[-1]}, {sum(rounds)} timings"),
        spread_line(noise),
        ("seed", str(job.seed)),
    )
