"""Recalibration: correct a latency table by runs of plans that were priced from it.

A run report states, for every stage, phase and kind of micro-batch, what all its layers took
together; the table states what each bitwidth should have taken. One factor per phase and bitwidth
is fitted so that the sums agree: least squares of the relative errors, weighted by time, with a
ridge towards a factor that all bitwidths share, because a run that mixes bitwidths cannot always
separate them. The factor of the master's own work contains the scheduler, as the profiled rows of 0
bits do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np

from llmpq.costmodel.costs import ClusterCosts, build_costs
from llmpq.errors import SpecError
from llmpq.spec.catalog import resolve_model
from llmpq.spec.cluster import DeviceGroup, Node
from llmpq.spec.fields import Fields, Rule, from_json, read_json
from llmpq.spec.plan import Plan, read_plan
from llmpq.spec.precision import Phase
from llmpq.spec.tables import MASTER_BITS, LatencySample, LatencyTable, read_latency_table

RIDGE = 1e-4
"""Weight of a common factor against a relative error of all of a phase's time."""
LIMITS = (0.05, 20.0)
_SHARES = ("busy_fraction", "wait_fraction", "send_fraction")

Factors = Mapping[tuple[Phase, int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """All micro-batches of one kind on one stage: predicted seconds by bitwidth, and measured ones.

    No factor corrects ``apart_s``, the predicted overhead of the stage.
    """

    phase: Phase
    predicted: Mapping[int, float]
    apart_s: float
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _MeasuredWork:
    """Micro-batches of one kind on one stage; ``seconds`` exclude the master's own work."""

    phase: Phase
    rows: Annotated[int, Rule(minimum=1)]
    tokens: float
    count: Annotated[int, Rule(minimum=1)]
    seconds: float
    master_s: float


def recalibrated_table(
    table: Path,
    runs: Sequence[tuple[Path, Path]],
    *,
    node: str | None = None,
    model: str | None = None,
) -> tuple[LatencyTable, dict[tuple[Phase, int], float]]:
    """Return a table corrected by runs, and the factors.

    Args:
        table: the latency table to correct.
        runs: for every run its report (``llmpq-dist --report``) and the strategy file that ran.
        node: use only the stages of this node; ``None`` for every stage whose device the table
            matches.
        model: directory or name of the model, ``None`` for the plan's own.

    Raises:
        SpecError: a malformed file, a report of another plan, or a plan whose stages share cores.
    """
    observations: list[Observation] = []
    for report, strategy in runs:
        plan = read_plan(strategy)
        _check_own_cores(plan)
        costs = _costs_with(table, plan, node, model)
        observations += _observations(plan, costs, report, strategy)
    factors = correction_factors(observations)
    return corrected(read_latency_table(table), factors), factors


def correction_factors(observations: Sequence[Observation]) -> dict[tuple[Phase, int], float]:
    """Return the factor on every phase and bitwidth observed; ``SpecError`` without any."""
    if not any(one.measured_s > 0 for one in observations):
        raise SpecError("report: found no measured work, expected that of a run")
    factors: dict[tuple[Phase, int], float] = {}
    for phase in Phase:
        own = [one for one in observations if one.phase is phase and one.measured_s > 0]
        if own:
            factors |= {(phase, bits): value for bits, value in _fit(own).items()}
    return factors


def corrected(table: LatencyTable, factors: Factors) -> LatencyTable:
    """Return the table with its seconds multiplied, and the factors in its provenance.

    A bitwidth that did not run takes the geometric mean of the phase's other factors. The master's
    work has one factor, whatever the bits of its head.
    """

    def factor(sample: LatencySample) -> float:
        known = factors.get((sample.phase, max(sample.bits, MASTER_BITS)))
        if known is not None or sample.bits <= MASTER_BITS:
            return 1.0 if known is None else known
        others = [
            value for (phase, bits), value in factors.items() if phase is sample.phase and bits
        ]
        return float(np.exp(np.mean(np.log(others)))) if others else 1.0

    words = ", ".join(
        f"{phase.value} {bits or 'master'} x{value:.4g}"
        for (phase, bits), value in sorted(factors.items())
    )
    kept = (line for line in table.provenance if line[0] != "recalibrated")
    return LatencyTable(
        samples=tuple(
            replace(sample, seconds=sample.seconds * factor(sample)) for sample in table.samples
        ),
        provenance=(*kept, ("recalibrated", words)),
    )


def _check_own_cores(plan: Plan) -> None:
    """Raise ``SpecError`` for a plan with more threads than cores: its seconds correct nothing."""
    for node in plan.cluster.nodes:
        used = [
            device for stage in plan.stages if (device := plan.device_of(stage)).node == node.name
        ]
        threads = sum(device.threads or 0 for device in used)
        if node.cores is not None and threads > node.cores:
            raise SpecError(
                f"plan: node '{node.name}': found {threads} threads on {node.cores} cores, "
                "expected a plan whose stages have cores of their own"
            )


def _costs_with(table: Path, plan: Plan, node: str | None, model: str | None) -> ClusterCosts:
    """Return the plan's costs with ``table`` as the profile of every device that it matches."""
    spec, _ = resolve_model(model or plan.model.source or plan.model.name)
    origin = dict(read_latency_table(table).provenance)

    def profiled(one: Node) -> Node:
        is_wanted = node in (None, one.name)
        groups = (
            replace(group, profile=str(table) if is_wanted and _matches(origin, group) else None)
            for group in one.devices
        )
        return replace(one, devices=tuple(groups))

    cluster = replace(plan.cluster, nodes=tuple(profiled(one) for one in plan.cluster.nodes))
    return build_costs(
        spec, cluster, dtype=plan.dtype, kv_bits=plan.kv_bits, head_bits=plan.head_width
    )


def _matches(origin: dict[str, str], group: DeviceGroup) -> bool:
    stated = {
        "device": group.type,
        "threads": group.threads,
        "cpu_isa": group.cpu_isa,
        "cpu_share": group.cpu_share or 1.0,
    }
    return all(
        value is None or origin.get(key, str(value)) == str(value) for key, value in stated.items()
    )


def _observations(
    plan: Plan, costs: ClusterCosts, report: Path, strategy: Path
) -> list[Observation]:
    """Return what a report states of the stages whose device has a profile."""
    fields = Fields(read_json(report), str(report))
    stages = fields.children("stages", minimum=1)
    if len(stages) != len(plan.stages):
        raise SpecError(
            f"{report}: field 'stages': found {len(stages)}, expected the {len(plan.stages)} of "
            f"{strategy}"
        )
    found: list[Observation] = []
    for rank, stage in enumerate(stages):
        if costs.cluster.devices[plan.stages[rank].device].profile is None:
            continue
        if not stage.has("work"):
            raise SpecError(f"{report}: field 'stages[{rank}].work': found none")
        work = [from_json(_MeasuredWork, one) for one in stage.children("work")]
        scheduler_s = 0.0 if rank else _scheduler_s(fields, stage)
        count = sum(one.count for one in work)
        for one in work:
            found += _observed(plan, costs, rank, one, scheduler_s / count)
    return found


def _scheduler_s(report: Fields, master: Fields) -> float:
    """Return the seconds that the master neither computed nor waited nor sent; 0 if unknown."""
    elapsed_s = report.optional_number("elapsed_s")
    shares = [master.optional_number(name) for name in _SHARES]
    known = [share for share in shares if share is not None]
    if elapsed_s is None or len(known) < len(_SHARES):
        return 0.0
    return max(0.0, 1.0 - sum(known)) * elapsed_s


def _observed(
    plan: Plan, costs: ClusterCosts, rank: int, work: _MeasuredWork, scheduler_s: float
) -> list[Observation]:
    """Return what one kind of work states of the layers and of the master and its scheduler."""
    stage = plan.stages[rank]
    if stage.experts is not None:
        raise SpecError(
            f"report: found stage {rank} with experts on the host or of other bits, expected "
            "whole layers, whose seconds a table holds"
        )
    device = costs.cluster.devices[stage.device]
    phase, rows, tokens, count = work.phase, work.rows, work.tokens, work.count
    kinds = costs.model.layer_kinds[stage.first_layer : stage.end_layer]
    predicted: dict[int, float] = {}
    for (kind, bits), layers in Counter(zip(kinds, stage.bits, strict=True)).items():
        layer_s = costs.layer_s(device, phase, bits, rows, tokens, kind)
        predicted[bits] = predicted.get(bits, 0.0) + layers * count * layer_s
    found = []
    if predicted:
        found.append(
            Observation(
                phase=phase,
                predicted=predicted,
                apart_s=count * costs.stage_s(device, phase),
                measured_s=work.seconds,
            )
        )
    if work.master_s > 0:
        prompt = round(tokens) if phase is Phase.PREFILL else 1
        found.append(
            Observation(
                phase=phase,
                predicted={MASTER_BITS: count * costs.master_s(device, phase, rows, prompt)},
                apart_s=0.0,
                measured_s=work.master_s + count * scheduler_s,
            )
        )
    return found


def _fit(observations: Sequence[Observation]) -> dict[int, float]:
    """Return the factors of one phase: ``sum_b f_b predicted_b + apart = measured``."""
    widths = sorted({bits for one in observations for bits in one.predicted})
    total_s = sum(one.measured_s for one in observations)
    weights = np.array([1.0 / np.sqrt(one.measured_s * total_s) for one in observations])
    predicted = weights[:, None] * np.array(
        [[one.predicted.get(bits, 0.0) for bits in widths] for one in observations]
    )  # [observations, widths]
    measured = weights * np.array([one.measured_s - one.apart_s for one in observations])
    whole = predicted.sum(axis=1)
    common = float(whole @ measured / (whole @ whole)) if whole.any() else 1.0
    # The unknowns are differences from the common factor, so that the ridge is towards it.
    matrix = np.vstack([predicted, np.sqrt(RIDGE) * np.eye(len(widths))])
    target = np.concatenate([measured - common * whole, np.zeros(len(widths))])
    found = np.linalg.lstsq(matrix, target, rcond=None)[0]
    values = np.clip(common + found, *LIMITS)
    return dict(zip(widths, values.tolist(), strict=True))
