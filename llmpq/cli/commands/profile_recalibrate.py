"""llmpq-profile recalibrate: correct a table by runs of plans that were priced from it."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llmpq.cli.common import command_line, print_json
from llmpq.costmodel import ClusterCosts, build_costs
from llmpq.costmodel.tables.profiles import SchedulerOverhead, drift_of, stage_loop_of
from llmpq.costmodel.tables.recalibrate import (
    MASTER_BITS,
    Factors,
    LoopObservation,
    Observation,
    corrected,
    correction_factors,
    drift_between,
    master_loop,
    stage_loop,
)
from llmpq.dist.metrics.measurement import WorkSample, work_from_fields
from llmpq.errors import SpecError
from llmpq.spec.catalog import resolve_model
from llmpq.spec.cluster import DeviceGroup, Node
from llmpq.spec.fields import Fields, digest_of, read_json
from llmpq.spec.plan import Plan, read_plan
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencyTable, read_latency_table, write_latency_table

NAME = "llmpq-profile"


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add ``recalibrate`` to the commands."""
    again = commands.add_parser(
        "recalibrate", help="correct a latency table by what a run of a plan measured"
    )
    again.add_argument(
        "--report", required=True, type=Path, nargs="+",
        help="what llmpq-dist --report (or --json) wrote of a run; several also tell how far one "
        "run differs from the next, by which --latency_bound is guarded",
    )  # fmt: skip
    again.add_argument(
        "--strat_file_name", required=True, type=Path, nargs="+",
        help="the plan that ran: one for all reports, or one each",
    )  # fmt: skip
    again.add_argument("--table", required=True, type=Path, help="latency table to correct (CSV)")
    again.add_argument("--output", required=True, type=Path, help="corrected table (CSV)")
    again.add_argument(
        "--node", help="only what ran on this node (default: every stage the table may speak for)"
    )
    again.add_argument("--model", help="directory or name (default: the plan's own)")
    again.add_argument("--json", action="store_true", default=argparse.SUPPRESS)


def run(options: argparse.Namespace, argv: Sequence[str] | None) -> int:
    """Read, correct, write, and print the factors."""
    table = read_latency_table(options.table)
    observations: list[Observation] = []
    loops: list[LoopObservation] = []
    others: list[LoopObservation] = []
    for number, (file, strategy) in enumerate(_pairs(options)):
        plan = read_plan(strategy)
        _refuse_shared_cores(plan)
        told = _read_run(plan, file, strategy)
        costs = _costs(plan, options)
        found = _observations(plan, costs, told, file)
        observations += [replace(one, run=number) for one in found]
        if costs.cluster.devices[plan.stages[0].device].profile is not None:
            loops += _loop(told)
        for rank in range(1, len(plan.stages)):
            if costs.cluster.devices[plan.stages[rank].device].profile is not None:
                others += [] if plan.is_split else _stage_loop(told, rank)
    factors = correction_factors(observations)
    loop = master_loop(loops) if loops else None
    other_s = stage_loop(others) if others else None
    new = corrected(table, factors, loop, drift_between(observations, factors), other_s)
    origin = [line for line in new.provenance if line[0] not in ("command", "recalibrated by")]
    digests = ", ".join(digest_of(read_json(file)) for file in options.report)
    first = (
        ("command", command_line(NAME, argv)),
        ("recalibrated by", f"{'report' if len(options.report) == 1 else 'reports'} {digests}"),
    )
    write_latency_table(options.output, replace(new, provenance=(*first, *origin)))
    _tell(options, new, factors)
    return 0


def _tell(options: argparse.Namespace, new: LatencyTable, factors: Factors) -> None:
    named = {f"{phase.value} {bits or 'master'}": value for (phase, bits), value in factors.items()}
    file, said = str(options.output), dict(new.provenance)
    loop, drift = SchedulerOverhead.of(file, said), drift_of(file, said)
    other_s = stage_loop_of(file, said)
    if options.json:
        record = {"output": file, "factors": named, "loop_s": asdict(loop), "drift": drift}
        print_json(record | {"stage_loop_s": other_s})
        return
    for name, value in sorted(named.items()):
        print(f"{name:16} x {value:.3f}")
    print(f"master's loop    {loop.step_s:.6f} s a micro-batch, {loop.row_s:.6f} s a row")
    print(f"other stages'    {other_s:.6f} s a micro-batch")
    print(f"drift            {drift:.1%} from one moment or run to the next")
    print(f"{len(new.samples)} points written to {options.output}")


def _pairs(options: argparse.Namespace) -> list[tuple[Path, Path]]:
    """Return every report with the plan that ran."""
    reports, plans = options.report, options.strat_file_name
    if len(plans) == 1:
        plans = plans * len(reports)
    if len(plans) != len(reports):
        raise SpecError(
            f"--strat_file_name: found {len(plans)} plans for {len(reports)} reports, expected one "
            "for all or one each"
        )
    return list(zip(reports, plans, strict=True))


def _costs(plan: Plan, options: argparse.Namespace) -> ClusterCosts:
    """Return the plan's costs with the table to correct behind every device it may speak for."""
    model, _ = resolve_model(options.model or plan.model.source or plan.model.name)
    origin = dict(read_latency_table(options.table).provenance)

    def spoken_for(node: Node) -> Node:
        is_own = options.node in (None, node.name)
        file = str(options.table)
        groups = (
            replace(group, profile=file if is_own and _speaks_for(origin, group) else None)
            for group in node.devices
        )
        return replace(node, devices=tuple(groups))

    cluster = replace(plan.cluster, nodes=tuple(spoken_for(node) for node in plan.cluster.nodes))
    return build_costs(model, cluster, dtype=plan.dtype, kv_bits=plan.kv_bits)


def _speaks_for(origin: dict[str, str], group: DeviceGroup) -> bool:
    """Tell whether a table may speak for a group: what both sides state is equal."""
    said = {
        "device": group.type,
        "threads": group.threads,
        "cpu_isa": group.cpu_isa,
        "cpu_share": group.cpu_share or 1.0,
    }
    return all(
        value is None or origin.get(key, str(value)) == str(value) for key, value in said.items()
    )


def _refuse_shared_cores(plan: Plan) -> None:
    for node in plan.cluster.nodes:
        used = [
            device for stage in plan.stages if (device := plan.device_of(stage)).node == node.name
        ]
        threads = sum(device.threads or 0 for device in used)
        if node.cores is not None and threads > node.cores:
            raise SpecError(
                f"plan: node '{node.name}': found {threads} threads on {node.cores} cores; seconds "
                "of stages that slow each other down correct nothing, expected a plan whose stages "
                "have cores of their own"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What a report says of a run; reports of older versions have no shares.

    Attributes:
        elapsed_s: from the first micro-batch sent off to the last token.
        work: of every stage, ``None`` where it tells nothing.
        shares: of every stage, what of the run it computed, waited and sent.
    """

    elapsed_s: float | None
    work: tuple[tuple[WorkSample, ...] | None, ...]
    shares: tuple[tuple[float | None, ...], ...]


def _read_run(plan: Plan, file: Path, strategy: Path) -> _Run:
    fields = Fields(read_json(file), str(file))
    stages = fields.children("stages", minimum=1)
    if len(stages) != len(plan.stages):
        raise SpecError(
            f"{file}: field 'stages': found {len(stages)}, expected the {len(plan.stages)} of "
            f"{strategy}"
        )
    return _Run(
        elapsed_s=fields.optional_number("elapsed_s"),
        work=tuple(
            tuple(work_from_fields(one) for one in stage.children("work"))
            if stage.has("work")
            else None
            for stage in stages
        ),
        shares=tuple(
            tuple(stage.optional_number(f"{what}_fraction") for what in ("busy", "wait", "send"))
            for stage in stages
        ),
    )


def _observations(plan: Plan, costs: ClusterCosts, run: _Run, file: Path) -> list[Observation]:
    found: list[Observation] = []
    for rank, work in enumerate(run.work):
        if costs.cluster.devices[plan.stages[rank].device].profile is None:
            continue
        if work is None:
            raise SpecError(f"{file}: field 'stages[{rank}].work': found none")
        beside = _busy_beside(plan, run, rank)
        for one in work:
            found += _observed(plan, costs, rank, one, beside)
    return found


def _busy_beside(plan: Plan, run: _Run, rank: int) -> float:
    """Return the share of a stage's time in which another of its node computed too.

    Taken as if they computed at unrelated times.
    """
    nodes = [plan.device_of(stage).node for stage in plan.stages]
    idle = 1.0
    for other, (busy, *_) in enumerate(run.shares):
        if other != rank and nodes[other] == nodes[rank] and busy is not None:
            idle *= 1.0 - busy
    return 1.0 - idle


def _loop(run: _Run) -> list[LoopObservation]:
    """Return what a master did that was neither work on the model nor waiting nor sending."""
    work, known = run.work[0], [share for share in run.shares[0] if share is not None]
    if work is None or run.elapsed_s is None or len(known) < len(run.shares[0]):
        return []
    return [
        LoopObservation(
            micro_batches=sum(one.count for one in work),
            rows=sum(one.count * one.rows for one in work),
            seconds=max(0.0, 1.0 - sum(known)) * run.elapsed_s,
        )
    ]


def _stage_loop(run: _Run, rank: int) -> list[LoopObservation]:
    """Return what a stage did that was neither computing nor waiting nor sending.

    The pipeline filling before its first micro-batch and draining behind its last one is not
    counted as waiting in a report: it is taken from the other stages' own mean seconds.
    """
    work = run.work[rank]
    known = [share for share in run.shares[rank] if share is not None]
    if not work or run.elapsed_s is None or len(known) < len(run.shares[rank]):
        return []
    idle_s = sum(_mean_s(one, Phase.PREFILL) for one in run.work[:rank])
    idle_s += sum(_mean_s(one, Phase.DECODE) for one in run.work[rank + 1 :])
    idle_s += _mean_s(run.work[0], Phase.DECODE, of_master=True)
    count = sum(one.count for one in work)
    seconds = max(0.0, (1.0 - sum(known)) * run.elapsed_s - idle_s)
    rows = sum(one.count * one.rows for one in work)
    return [LoopObservation(micro_batches=count, rows=rows, seconds=seconds)]


def _mean_s(work: tuple[WorkSample, ...] | None, phase: Phase, *, of_master: bool = False) -> float:
    """Return the seconds of a stage's mean micro-batch in a phase, or of the master's own work."""
    own = [one for one in work or () if one.phase is phase]
    count = sum(one.count for one in own)
    spent_s = sum(one.master_s if of_master else one.seconds for one in own)
    return spent_s / count if count else 0.0


def _observed(
    plan: Plan, costs: ClusterCosts, rank: int, work: WorkSample, beside: float
) -> list[Observation]:
    """Return what one kind of work says of the layers, and of the master.

    ``beside`` is the share of the time in which company slowed it down: a forecast counts company
    by itself, so that the table must not.
    """
    stage = plan.stages[rank]
    device = costs.cluster.devices[stage.device]
    kinds = costs.model.layer_kinds[stage.first_layer : stage.end_layer]
    slower = 1.0 + beside * (costs.company_factor(device, work.phase) - 1.0)
    predicted: dict[int, float] = {}
    for (kind, bits), count in Counter(zip(kinds, stage.bits, strict=True)).items():
        one_s = costs.layer_s(device, work.phase, bits, work.rows, work.tokens, kind)
        predicted[bits] = predicted.get(bits, 0.0) + slower * count * work.count * one_s
    found = []
    if predicted:
        found.append(
            Observation(
                phase=work.phase,
                predicted=predicted,
                apart_s=slower * work.count * costs.stage_s(device, work.phase),
                measured_s=work.seconds,
            )
        )
    if work.master_s > 0:
        tokens = round(work.tokens) if work.phase is Phase.PREFILL else 1
        master_s = slower * work.count * costs.master_s(device, work.phase, work.rows, tokens)
        found.append(
            Observation(
                phase=work.phase,
                predicted={MASTER_BITS: master_s},
                apart_s=0.0,
                measured_s=work.master_s,
            )
        )
    return found
