"""llmpq-profile recalibrate: correct the tables of a plan by one run of it."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmpq.cli.common import command_line, print_json
from llmpq.costmodel import ClusterCosts, build_costs
from llmpq.costmodel.recalibrate import MASTER_BITS, Observation, corrected, correction_factors
from llmpq.dist.measurement import WorkSample, work_from_fields
from llmpq.errors import SpecError
from llmpq.spec.catalog import resolve_model
from llmpq.spec.cluster import DeviceGroup, Node
from llmpq.spec.fields import Fields, digest_of, read_json
from llmpq.spec.plan import Plan
from llmpq.spec.plan_io import read_plan
from llmpq.spec.precision import Phase
from llmpq.spec.tables import read_latency_table, write_latency_table

NAME = "llmpq-profile"


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add ``recalibrate`` to the commands."""
    again = commands.add_parser(
        "recalibrate", help="correct a latency table by what a run of a plan measured"
    )
    again.add_argument(
        "--report", required=True, type=Path, help="what llmpq-dist --report (or --json) wrote"
    )
    again.add_argument("--strat_file_name", required=True, type=Path, help="the plan that ran")
    again.add_argument("--table", required=True, type=Path, help="latency table to correct (CSV)")
    again.add_argument("--output", required=True, type=Path, help="corrected table (CSV)")
    again.add_argument(
        "--node", help="only what ran on this node (default: every stage the table may speak for)"
    )
    again.add_argument("--model", help="directory or name (default: the plan's own)")
    again.add_argument("--json", action="store_true", default=argparse.SUPPRESS)


def run(options: argparse.Namespace, argv: Sequence[str] | None) -> int:
    """Read, correct, write, and print the factors."""
    plan = read_plan(options.strat_file_name)
    _refuse_shared_cores(plan)
    table = read_latency_table(options.table)
    report = read_json(options.report)
    costs = _costs(plan, options)
    factors = correction_factors(_observations(plan, costs, report, options))
    new = corrected(table, factors)
    origin = [line for line in new.provenance if line[0] != "command"]
    first = (
        ("command", command_line(NAME, argv)),
        ("recalibrated by", f"report {digest_of(report)}"),
    )
    write_latency_table(options.output, replace(new, provenance=(*first, *origin)))
    named = {f"{phase.value} {bits or 'master'}": value for (phase, bits), value in factors.items()}
    if options.json:
        print_json({"output": str(options.output), "factors": named})
    else:
        for name, value in sorted(named.items()):
            print(f"{name:16} x {value:.3f}")
        print(f"{len(new.samples)} points written to {options.output}")
    return 0


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


def _observations(
    plan: Plan, costs: ClusterCosts, report: Any, options: argparse.Namespace
) -> list[Observation]:
    fields = Fields(report, str(options.report))
    stages = fields.children("stages", minimum=1)
    if len(stages) != len(plan.stages):
        raise SpecError(
            f"{options.report}: field 'stages': found {len(stages)}, expected the "
            f"{len(plan.stages)} of {options.strat_file_name}"
        )
    found: list[Observation] = []
    for rank, stage in enumerate(stages):
        if costs.cluster.devices[plan.stages[rank].device].profile is None:
            continue
        if not stage.has("work"):
            raise SpecError(f"{options.report}: field 'stages[{rank}].work': found none")
        for one in stage.children("work"):
            found += _observed(plan, costs, rank, work_from_fields(one))
    return found


def _observed(plan: Plan, costs: ClusterCosts, rank: int, work: WorkSample) -> list[Observation]:
    """Return what one kind of work says of the layers, and of the master."""
    stage = plan.stages[rank]
    device = costs.cluster.devices[stage.device]
    kinds = costs.model.layer_kinds[stage.first_layer : stage.end_layer]
    predicted: dict[int, float] = {}
    for (kind, bits), count in Counter(zip(kinds, stage.bits, strict=True)).items():
        one_s = costs.layer_s(device, work.phase, bits, work.rows, work.tokens, kind)
        predicted[bits] = predicted.get(bits, 0.0) + count * work.count * one_s
    found = []
    if predicted:
        found.append(
            Observation(
                phase=work.phase,
                predicted=predicted,
                apart_s=work.count * costs.stage_s(device, work.phase),
                measured_s=work.seconds,
            )
        )
    if work.master_s > 0:
        tokens = round(work.tokens) if work.phase is Phase.PREFILL else 1
        master_s = work.count * costs.master_s(device, work.phase, work.rows, tokens)
        found.append(
            Observation(
                phase=work.phase,
                predicted={MASTER_BITS: master_s},
                apart_s=0.0,
                measured_s=work.master_s,
            )
        )
    return found
