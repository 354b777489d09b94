"""Recalibration: a latency table corrected by runs of plans that were priced from it.

A run tells, for every stage, phase and kind of micro-batch, what all its layers took together. The
table says what each bitwidth would have taken. One factor is sought for every phase and bitwidth,
so that the sums agree: least squares of the relative errors, weighted by the time they stand for,
and as little correction as they allow (a ridge towards 1), for a run that mixes bitwidths cannot
always tell them apart. Bitwidths that did not run take the mean correction of their phase. The
master's own work is measured apart and corrected by itself.

What the loops of the master and of other stages take beside the model is known from runs alone, so
it is added. Several
runs also tell how far the machine differs from one to the next, after all corrections.

It corrects seconds, never shapes: a table of the wrong kernel deserves a new measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmpq.costmodel.tables.nnls import fit_relative
from llmpq.costmodel.tables.profiles import (
    DRIFT_KEY,
    LOOP_KEY,
    STAGE_LOOP_KEY,
    SchedulerOverhead,
    drift_of,
)
from llmpq.errors import SpecError
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample, LatencyTable

MASTER_BITS = 0
RIDGE = 1e-4
"""Weight of "as all bitwidths" against a relative error of all of a phase's time."""
LIMITS = (0.05, 20.0)

Factors = Mapping[tuple[Phase, int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """All micro-batches of one kind on one stage.

    Attributes:
        phase: prefill or decode.
        predicted: by bitwidth, the seconds that the table gives; bits 0 is the master's own work.
        apart_s: predicted seconds that no factor corrects (what a stage takes itself).
        measured_s: all of it, measured.
        run: which run it is of.
    """

    phase: Phase
    predicted: Mapping[int, float]
    apart_s: float
    measured_s: float
    run: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopObservation:
    """What a stage of one run did that was neither work on the model nor waiting nor sending.

    Attributes:
        micro_batches: that it worked on, or that came back to the master.
        rows: of all of them.
        seconds: of all of them.
    """

    micro_batches: int
    rows: int
    seconds: float


def correction_factors(observations: Sequence[Observation]) -> dict[tuple[Phase, int], float]:
    """Return the factor on every phase and bitwidth that was observed.

    Raises:
        SpecError: nothing was measured.
    """
    if not any(one.measured_s > 0 for one in observations):
        raise SpecError("report: found no measured work, expected that of a run")
    factors: dict[tuple[Phase, int], float] = {}
    for phase in Phase:
        own = [one for one in observations if one.phase is phase and one.measured_s > 0]
        if own:
            factors |= {(phase, bits): value for bits, value in _fit(own).items()}
    return factors


def drift_between(observations: Sequence[Observation], factors: Factors) -> float:
    """Return one standard deviation of what runs took, as a share of what the corrections give.

    What the corrected table gets wrong of a run and what the machine does from one run to the next
    are both in it. 0 for a single run, which cannot tell.
    """
    ratios = []
    for run in sorted({one.run for one in observations}):
        own = [one for one in observations if one.run == run]
        given_s = sum(
            one.apart_s + sum(factors[one.phase, bits] * s for bits, s in one.predicted.items())
            for one in own
        )
        ratios.append(sum(one.measured_s for one in own) / given_s)
    return float(np.std(ratios, ddof=1)) if len(ratios) > 1 else 0.0


def master_loop(observations: Sequence[LoopObservation]) -> SchedulerOverhead:
    """Return the master's loop, by micro-batch and by row where runs are unlike enough to tell."""
    found = [one for one in observations if one.micro_batches and one.seconds > 0]
    if not found:
        return SchedulerOverhead()
    features = np.array([[float(one.micro_batches), float(one.rows)] for one in found])
    step_s, row_s = fit_relative(features, np.array([one.seconds for one in found]))
    return SchedulerOverhead(step_s=float(step_s), row_s=float(row_s))


def stage_loop(observations: Sequence[LoopObservation]) -> float:
    """Return the seconds of a micro-batch of all stages but the master, in the mean."""
    count = sum(one.micro_batches for one in observations)
    return sum(one.seconds for one in observations) / count if count else 0.0


def corrected(
    table: LatencyTable,
    factors: Factors,
    loop: SchedulerOverhead | None = None,
    drift: float = 0.0,
    stage_loop_s: float | None = None,
) -> LatencyTable:
    """Return the table with its seconds multiplied, and what was done in its provenance.

    A bitwidth that did not run takes the mean factor of the phase's others.

    Args:
        table: to correct.
        factors: on its seconds.
        loop: what the master's own loop takes, ``None`` to leave what the table says.
        drift: between the runs; what the table says where that is more.
        stage_loop_s: what any other stage's loop takes, ``None`` to leave what the table says.
    """

    def factor(sample: LatencySample) -> float:
        known = factors.get((sample.phase, sample.bits))
        if known is not None or sample.bits == MASTER_BITS:
            return 1.0 if known is None else known
        others = [
            value for (phase, bits), value in factors.items() if phase is sample.phase and bits
        ]
        return float(np.exp(np.mean(np.log(others)))) if others else 1.0

    words = ", ".join(
        f"{phase.value} {bits or 'master'} x{value:.4g}"
        for (phase, bits), value in sorted(factors.items())
    )
    said = {"recalibrated": words}
    if loop is not None:
        said[LOOP_KEY] = f"step {loop.step_s!r} row {loop.row_s!r}"
    if stage_loop_s is not None:
        said[STAGE_LOOP_KEY] = repr(stage_loop_s)
    if drift > drift_of("table", dict(table.provenance)):
        said[DRIFT_KEY] = f"{drift:.4f}"
    return LatencyTable(
        samples=tuple(
            replace(sample, seconds=sample.seconds * factor(sample)) for sample in table.samples
        ),
        provenance=(*(line for line in table.provenance if line[0] not in said), *said.items()),
    )


def _fit(observations: Sequence[Observation]) -> dict[int, float]:
    """Return the factors of one phase: ``sum_b f_b predicted_b + apart = measured``.

    What the runs do not tell apart gets the factor that all bitwidths share: a machine is sooner
    slower throughout than at one of them.
    """
    widths = sorted({bits for one in observations for bits in one.predicted})
    total_s = sum(one.measured_s for one in observations)
    weights = np.array([1.0 / np.sqrt(one.measured_s * total_s) for one in observations])
    predicted = weights[:, None] * np.array(
        [[one.predicted.get(bits, 0.0) for bits in widths] for one in observations]
    )  # [observations, widths]
    measured = weights * np.array([one.measured_s - one.apart_s for one in observations])
    whole = predicted.sum(axis=1)
    common = float(whole @ measured / (whole @ whole)) if whole.any() else 1.0
    # Solved for what a factor differs from the common one, so that the ridge is towards that.
    matrix = np.vstack([predicted, np.sqrt(RIDGE) * np.eye(len(widths))])
    target = np.concatenate([measured - common * whole, np.zeros(len(widths))])
    found = np.linalg.lstsq(matrix, target, rcond=None)[0]
    values = np.clip(common + found, *LIMITS)
    return dict(zip(widths, values.tolist(), strict=True))
