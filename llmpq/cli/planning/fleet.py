"""Fleets on the command line: ``llmpq-algo --replicas`` and ``llmpq-check FLEET.json``."""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llmpq.assigner.fleet import (
    FleetPlan,
    ReplicaSpeed,
    crowded_hosts,
    mean_ttft_s,
    plan_fleet,
)
from llmpq.assigner.objective import relative_gap
from llmpq.assigner.request import PlanRequest, Progress
from llmpq.assigner.verify import TOLERANCE, verify_plan
from llmpq.cli.common import print_json
from llmpq.cli.options import with_described
from llmpq.cli.render import (
    aligned,
    compact_bits,
    rate_text,
    requests_record,
    requests_text,
)
from llmpq.errors import CapacityError, SpecError
from llmpq.spec.fields import read_json
from llmpq.spec.plan import Fleet, FleetMember, Plan, read_fleet, write_fleet, write_plan
from llmpq.units import format_bytes, format_seconds

MORE_TIME = 4
"""How many times as long a time limit is proposed where the time was up."""

Show = Callable[[Callable[[Progress], FleetPlan]], FleetPlan]


def run_fleet(options: argparse.Namespace, request: PlanRequest, output: Path, show: Show) -> int:
    """Plan a fleet, write its files and print it."""
    for name in ("pareto", "export"):
        if getattr(options, name) is not None:
            raise SpecError(f"--replicas: found together with --{name}, expected one of them")
    if options.method != "llmpq" or options.what_if:
        raise SpecError("--replicas: found with --method or --what_if, expected neither")
    found = show(
        lambda progress: plan_fleet(
            request,
            options.replicas or None,
            rate=options.rate,
            same_bits=options.same_bits,
            command=options.command,
            progress=progress,
        )
    )
    paths = [
        output.with_name(f"{output.stem}__r{number}{output.suffix}")
        for number in range(1, len(found.replicas) + 1)
    ]
    fleet = _fleet(found, request, [path.name for path in paths])
    for path, replica in zip(paths, found.replicas, strict=True):
        write_plan(path, replica.plan)
    write_fleet(output, fleet)
    plans = [replica.plan for replica in found.replicas]
    if options.json:
        without = [dict(replica.without) for replica in found.replicas]
        record = fleet_record(fleet, plans, str(output))
        for entry, reasons in zip(record["replicas"], without, strict=True):
            entry["without_one"] = reasons
        found_by = {"gap": found.gap, "searches": found.searches, "limits": asdict(found.limits)}
        print_json({**record, **found_by, **requests_record(plans, options.requests)})
    else:
        print(fleet_table(fleet, plans))
        asked = requests_text(plans, options.requests)
        cores = [f"cores          {text}" for text in crowded_hosts(request.cluster)]
        for line in (*_reasons(found), *_limits(found), *cores, *asked):
            print(line)
        print(f"written        {output} and {len(paths)} strategy files")
    if options.plot is not None:
        from llmpq.cli.plots import draw_fleet

        draw_fleet(fleet, plans, options.plot)
    return 0


def _fleet(found: FleetPlan, request: PlanRequest, names: Sequence[str]) -> Fleet:
    labels = [device.label for device in request.cluster.devices]
    return Fleet(
        model=request.model.name,
        replicas=tuple(
            FleetMember(
                strategy=name,
                devices=tuple(labels[device] for device in replica.devices),
                requests_per_s=replica.requests_per_s,
                arrivals_per_s=replica.arrivals_per_s,
            )
            for name, replica in zip(names, found.replicas, strict=True)
        ),
        requests_per_s=found.requests_per_s,
        bound=found.bound,
        status=found.status,
        quality_budget=found.quality_budget,
        others=found.others,
        ttft_s=found.ttft_s,
        ttft_bound_s=found.ttft_bound_s,
        cluster=request.cluster,
    )


def is_fleet(path: str) -> bool:
    """Whether a JSON file is a fleet's and not a strategy's."""
    found = read_json(path)
    return isinstance(found, dict) and "replicas" in found


def check_fleet(options: argparse.Namespace) -> int:
    """Validate a fleet file and every strategy file of it, and print it."""
    path = options.strategy
    fleet = read_fleet(path)
    plans = fleet.plans(path)
    excess = 0
    warnings: list[str] = []
    for replica, plan in zip(fleet.replicas, plans, strict=True):
        file = str(Path(path).parent / replica.strategy)
        checked = verify_plan(
            replace(plan, cluster=with_described(plan.cluster, options.devices, file)),
            file,
            profile_dir=None if options.profile is None else Path(options.profile),
            omega_file=options.omega_file,
        )
        excess += checked.excess_bytes
        own = [*checked.warnings, *_differences(replica, plan, fleet)]
        warnings += [f"{replica.strategy}: {warning}" for warning in own]
    warnings += [*_ttft_difference(fleet, plans), *_shared_cores(fleet)]
    if options.json:
        record = fleet_record(fleet, plans, path)
        record |= {"fits": not excess, "excess_bytes": excess, "warnings": warnings}
        print_json({**record, **requests_record(plans, options.requests)})
    else:
        print(fleet_table(fleet, plans))
        for line in requests_text(plans, options.requests):
            print(line)
        words = f"{len(warnings)} warnings" if warnings else "every stored figure is confirmed"
        fits = f"does NOT fit: {format_bytes(excess)} too much" if excess else "valid and fits"
        print(f"checked        {fits}; {words}")
    for warning in warnings:
        print(f"llmpq-check: warning: {warning}", file=sys.stderr)
    if options.plot is not None:
        from llmpq.cli.plots import draw_fleet

        draw_fleet(fleet, plans, options.plot)
    if excess:
        raise CapacityError(f"{path}: its plans need {format_bytes(excess)} more memory")
    return 0


def _differences(replica: FleetMember, plan: Plan, fleet: Fleet) -> Iterator[str]:
    """Yield what the strategy file does not confirm."""
    rate = plan.workload.batch / plan.estimate.latency_s
    if not math.isclose(rate, replica.requests_per_s, rel_tol=TOLERANCE):
        yield f"makes {rate:.4g} requests/s, the fleet file states {replica.requests_per_s:.4g}"
    arrivals = replica.arrivals_per_s
    if arrivals is not None and arrivals > (most := ReplicaSpeed.of(plan).most_requests_per_s):
        yield f"takes {most:.4g} arrivals/s, the fleet file gives it {arrivals:.4g}"
    budget, quality = fleet.quality_budget, plan.estimate.quality
    if budget is not None and quality > budget * (1 + TOLERANCE) + TOLERANCE:
        yield f"loses {quality:.4g}, the fleet allows {budget:.4g}"


def _ttft_difference(fleet: Fleet, plans: Sequence[Plan]) -> list[str]:
    """Return a warning where the plans do not confirm the TTFT of a fleet file."""
    rates = [replica.arrivals_per_s or 0.0 for replica in fleet.replicas]
    speeds = [ReplicaSpeed.of(plan) for plan in plans]
    busy = any(rate > speed.most_requests_per_s for rate, speed in zip(rates, speeds, strict=True))
    if fleet.ttft_s is None or busy or not sum(rates):
        return []
    found = mean_ttft_s(speeds, rates)
    if math.isclose(found, fleet.ttft_s, rel_tol=TOLERANCE):
        return []
    return [f"its plans give a TTFT of {found:.4g} s, the fleet file states {fleet.ttft_s:.4g} s"]


def _shared_cores(fleet: Fleet) -> Iterator[str]:
    """Yield a warning for each host whose cores several replicas share."""
    devices = {device.label: device for device in fleet.cluster.devices}
    for node in fleet.cluster.nodes:
        own = [
            sum(
                devices[name].threads or 0
                for name in replica.devices
                if devices[name].node == node.name
            )
            for replica in fleet.replicas
        ]
        if node.cores is not None and sum(own) > max(node.cores, *own):
            yield (
                f"{node.name}: its replicas have {sum(own)} threads on {node.cores} cores and slow "
                "each other down, which their plans do not count"
            )


def fleet_record(fleet: Fleet, plans: Sequence[Plan], path: str) -> dict[str, Any]:
    """Return the JSON object of a fleet."""
    return {
        "fleet": path,
        "model": fleet.model,
        "requests_per_s": fleet.requests_per_s,
        "bound": fleet.bound,
        "ttft_s": fleet.ttft_s,
        "ttft_bound_s": fleet.ttft_bound_s,
        "status": fleet.status,
        "quality_budget": fleet.quality_budget,
        "replicas": [
            {
                "strategy": replica.strategy,
                "devices": list(replica.devices),
                "batch": plan.workload.batch,
                "requests_per_s": replica.requests_per_s,
                "arrivals_per_s": replica.arrivals_per_s,
                "quality": plan.estimate.quality,
            }
            for replica, plan in zip(fleet.replicas, plans, strict=True)
        ],
        "idle": list(fleet.idle),
        "others": [
            {
                "name": one.name,
                "replicas": one.replicas,
                "requests_per_s": one.requests_per_s,
                "ttft_s": one.ttft_s,
            }
            for one in fleet.others
        ],
    }


def fleet_table(fleet: Fleet, plans: Sequence[Plan]) -> str:
    """Return a fleet as text: its replicas, and the other ways to cut the cluster."""
    work = plans[0].workload
    has_rate = fleet.ttft_s is not None
    rows = [
        ("replica", "devices", "batch", "bits", "quality lost", "requests/s")
        + (("arrivals/s", "TTFT") if has_rate else ())
    ]
    rows += [
        (
            str(number),
            devices_text(replica.devices),
            str(plan.workload.batch),
            compact_bits(plan.bits),
            f"{plan.estimate.quality:.3g}",
            f"{replica.requests_per_s:.4g}",
            *_arrivals(replica, plan),
        )
        for number, (replica, plan) in enumerate(zip(fleet.replicas, plans, strict=True), start=1)
    ]
    lines = [
        f"{fleet.model} on {fleet.cluster.name}: {work.prompt_tokens} prompt tokens, "
        f"{work.new_tokens} new tokens each",
        "",
        *aligned(rows),
        "",
        f"fleet          {_result(fleet)}",
    ]
    if fleet.idle:
        lines.append(f"idle           {devices_text(fleet.idle)}")
    if fleet.others:
        lines += ["", *aligned(_others(fleet)), ""]
    return "\n".join(lines)


def _arrivals(replica: FleetMember, plan: Plan) -> tuple[str, ...]:
    """Return share and TTFT of a replica, nothing where the rate of arrivals is not given."""
    rate = replica.arrivals_per_s
    if rate is None:
        return ()
    return f"{rate:.4g}", format_seconds(ReplicaSpeed.of(plan).ttft_s(rate))


def _result(fleet: Fleet) -> str:
    """Return what a fleet makes, and how good that is."""
    value, gap = f"{fleet.requests_per_s:.4g} requests/s", "below"
    share = relative_gap(fleet.bound, fleet.requests_per_s)
    if fleet.ttft_s is not None and fleet.ttft_bound_s:
        rate = sum(replica.arrivals_per_s or 0.0 for replica in fleet.replicas)
        value = f"TTFT {format_seconds(fleet.ttft_s)} at {rate:.4g} arrivals/s"
        share, gap = fleet.ttft_s / fleet.ttft_bound_s - 1, "above"
    proof = "optimal" if fleet.status == "optimal" else f"at most {share:.1%} {gap} the best"
    budget = fleet.quality_budget
    return f"{value}, {proof}" + (
        "" if budget is None else f"; no replica loses more than {budget:.3g}"
    )


def _others(fleet: Fleet) -> list[tuple[str, ...]]:
    """Return a table of the other ways to cut the cluster."""
    if fleet.ttft_s is None:
        rows: list[tuple[str, ...]] = [("cut", "replicas", "requests/s", "of the fleet's")]
        for one in fleet.others:
            rate = one.requests_per_s
            share = f"{rate / fleet.requests_per_s:.2f}x" if rate else ""
            rows.append((one.name, str(one.replicas), rate_text(rate), share))
        return rows
    rows = [("cut", "replicas", "requests/s", "TTFT", "of the fleet's")]
    for one in fleet.others:
        texts = ("-", "")
        if one.ttft_s is not None:
            texts = format_seconds(one.ttft_s), f"{one.ttft_s / fleet.ttft_s:.2f}x"
        rows.append((one.name, str(one.replicas), rate_text(one.requests_per_s), *texts))
    return rows


def devices_text(labels: Sequence[str]) -> str:
    """Return devices as counts of their types by node, such as ``3 x node0/T4-16G``."""
    counts = Counter(label.rpartition("#")[0] for label in labels)
    return ", ".join(name if n == 1 else f"{n} x {name}" for name, n in counts.items())


def _reasons(found: FleetPlan) -> Iterator[str]:
    """Yield what each replica would make without one of its devices."""
    for number, replica in enumerate(found.replicas, start=1):
        for device, rate in replica.without:
            lost = "does not fit" if not rate else f"{rate:.4g} requests/s"
            yield f"replica {number:<6} without one {device}: {lost}"


def _limits(found: FleetPlan) -> Iterator[str]:
    """Yield what keeps a fleet from being better, and what would lift it."""
    limits, budget = found.limits, found.quality_budget
    if limits.time_limit_s is not None:
        more_s = MORE_TIME * limits.time_limit_s
        yield (
            f"time limit     {limits.planned:,} of {limits.candidates:,} parts with a batch were "
            f"planned in {limits.time_limit_s:g} s; --time_limit {more_s:g} plans more"
        )
    if limits.budget is not None and budget is not None:
        yield (
            f"quality limit  no layer may have fewer bits within {budget:.3g}; --quality_budget "
            f"{limits.budget:g} allows {limits.bits} bits in every layer"
        )
    if not limits.is_complete:
        yield (
            f"parts          of this many devices not all parts are considered, but "
            f"{limits.candidates:,} with a batch"
        )
    if not limits.has_all_orders:
        yield (
            "orders         equal devices of a node are adjacent in every replica; --orders all "
            "searches every order"
        )
