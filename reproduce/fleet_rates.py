"""Time to first token (TTFT) against the rate of arrivals, for ways to cut a cluster into replicas.

    python -m reproduce.fleet_rates --picture docs/images/fleet_rates.png

Every way is planned with the same loss of quality at most, and simulated with the engine's own
scheduler behind SAL in seconds. Its capacity is the highest rate of the curve whose 95th percentile
of TTFT is within ``TTFT_BOUND_S``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from llmpq.assigner import PlanRequest, make_plan
from llmpq.assigner.fleet import FleetPlan, plan_fleet
from llmpq.assigner.fleet.partition import DeviceCounts, DevicePools
from llmpq.assigner.fleet.search import batches
from llmpq.assigner.request import costs_of
from llmpq.batching import uniform_depth
from llmpq.batching.engine_step import EngineLimits
from llmpq.batching.queue_order import queue_order
from llmpq.errors import InfeasibleError
from llmpq.routing import load_balancer
from llmpq.sim.costs import PlanCosts, PlanEngineCosts
from llmpq.sim.fleet import FleetReplica, simulate_fleet
from llmpq.spec import catalog
from llmpq.spec.cluster import cluster_of_types
from llmpq.spec.plan import Plan
from llmpq.spec.precision import Phase
from llmpq.spec.runtime_constants import KV_BLOCK_SIZE
from llmpq.spec.workload import LengthDistribution, Workload, draw_trace
from reproduce.output import Record, emit, say, table

DEVICES = {"A100-80G": 2, "L40S": 2}
MODEL = "meta-llama/Llama-3.1-70B"
WORKLOAD = Workload(batch=96, prompt_tokens=512, new_tokens=128)
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Rates of the curves, of what the fleet makes at most."""
REQUESTS = 600
TTFT_BOUND_S = 2.0
PATIENCE_S = 600.0
"""Of a search, which takes ten: on a busy machine too it ends with a proof."""
FLEET, AT_RATE = "fleet for the most requests/s", "fleet for the least TTFT at the rate"


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, simulate, draw and print."""
    parser = argparse.ArgumentParser(prog="reproduce.fleet_rates", description=__doc__)
    parser.add_argument("--picture", type=Path, metavar="FILE.png")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for machines")
    options = parser.parse_args(argv)
    record = collect()
    if options.picture is not None:
        from reproduce.pictures import draw_fleet_rates  # noqa: PLC0415  matplotlib is extra

        draw_fleet_rates(record, options.picture)
    emit(report(record), record, as_json=options.json)
    return 0


def collect() -> Record:
    """Return the curves."""
    request = PlanRequest(
        model=catalog.model(MODEL),
        cluster=cluster_of_types(DEVICES),
        workload=WORKLOAD,
        dtype="bfloat16",
        kv_bits=16,
        latency="roofline",
        time_limit_s=PATIENCE_S,
    )
    fleet = plan_fleet(request)
    request = replace(request, quality_budget=fleet.quality_budget, theta_s=0.0)
    rates = [round(share * fleet.requests_per_s, 3) for share in SHARES]
    curves = {}
    for name, plans in ways(request, fleet).items():
        say(name)
        curves[name] = [simulated(request, plans, rate) for rate in rates]
    say(AT_RATE)
    curves[AT_RATE] = []
    for rate in rates:
        try:
            found = plan_fleet(request, rate=rate)
        except InfeasibleError:
            break
        entry = simulated(request, [one.plan for one in found.replicas], rate)
        replicas = [len(one.devices) for one in found.replicas]
        curves[AT_RATE].append({**entry, "forecast_s": found.ttft_s, "devices": replicas})
    return {
        "model": MODEL,
        "devices": DEVICES,
        "requests": REQUESTS,
        "ttft_bound_s": TTFT_BOUND_S,
        "curves": curves,
    }


def ways(request: PlanRequest, fleet: FleetPlan) -> dict[str, list[Plan]]:
    """Return the plans of each way to cut the cluster that holds the model."""
    pools = DevicePools.of(request.cluster)
    found = {
        "one pipeline": [make_plan(request)],
        "one replica a node": best_of(request, pools, pools.of_nodes()),
        "one replica a device": best_of(request, pools, pools.of_devices()),
        FLEET: [replica.plan for replica in fleet.replicas],
    }
    return {name: plans for name, plans in found.items() if plans}


def best_of(request: PlanRequest, pools: DevicePools, parts: Sequence[DeviceCounts]) -> list[Plan]:
    """Return the plans of parts with the batches that make the most requests a second."""
    best: tuple[float, list[Plan]] = (0.0, [])
    known: dict[tuple[DeviceCounts, int], Plan | None] = {}
    for sizes in product(batches(request.workload.batch), repeat=len(parts)):
        if sum(sizes) > request.workload.batch:
            continue
        plans = []
        for part, size in zip(parts, sizes, strict=True):
            if (part, size) not in known:
                known[part, size] = plan_of_part(request, pools, part, size)
            plans.append(known[part, size])
        fitting = [plan for plan in plans if plan is not None]
        value = sum(plan.workload.batch / plan.estimate.latency_s for plan in fitting)
        best = max(best, (value, fitting), key=lambda one: one[0])
    return best[1]


def plan_of_part(
    request: PlanRequest, pools: DevicePools, part: DeviceCounts, size: int
) -> Plan | None:
    """Return the plan of a part, ``None`` where it does not hold the model."""
    work = replace(request.workload, batch=size)
    try:
        return make_plan(replace(request, cluster=pools.cluster_of(part), workload=work))
    except InfeasibleError:
        return None


def simulated(request: PlanRequest, plans: Sequence[Plan], rate: float) -> Record:
    """Return TTFT of replicas behind SAL in seconds at a rate."""
    replicas = [
        FleetReplica(
            costs=PlanEngineCosts(PlanCosts(plan, costs_of(request, plan.cluster))),
            limits=limits_of(plan),
            order=queue_order("fcfs"),
        )
        for plan in plans
    ]
    work = request.workload
    trace = draw_trace(
        REQUESTS, spread(work.prompt_tokens), spread(work.new_tokens), requests_per_s=rate
    )
    times = simulate_fleet(replicas, load_balancer("sal_seconds"), trace).total.engine_json()
    return {"rate": rate, "ttft_s": times["time_to_first_token_s"]}


def spread(mean: int) -> LengthDistribution:
    """Return lengths between a half and one and a half of a mean."""
    lengths = tuple(range(mean // 2, mean + mean // 2 + 1))
    return LengthDistribution(lengths=lengths, probabilities=(1.0 / len(lengths),) * len(lengths))


def limits_of(plan: Plan) -> EngineLimits:
    """Return the limits of the engine that runs a plan: its slots and a step of 1,024 tokens."""
    blocks = plan.workload.batch * -(-plan.workload.max_context_tokens // KV_BLOCK_SIZE)
    return EngineLimits(
        token_budget=1024,
        max_sequences=256,
        num_blocks=blocks,
        block_size=KV_BLOCK_SIZE,
        watermark=0.01,
        prefix_caching=False,
        steps_in_flight=uniform_depth(len(plan.stages)).max_in_flight(Phase.DECODE),
    )


def capacity(curve: Sequence[Record]) -> float:
    """Return the highest rate up to which the 95th percentile is within the bound."""
    best = 0.0
    for point in curve:
        if point["ttft_s"]["p95"] > TTFT_BOUND_S:
            break
        best = point["rate"]
    return best


def report(record: Record) -> str:
    """Return the capacities, and forecast and simulation at each rate."""
    curves = record["curves"]
    rows = [
        [name, f"{capacity(curve):.3g}", *(_at(curve, place) for place in (2, 5, 8))]
        for name, curve in curves.items()
    ]
    rates = [f"mean TTFT at {curves[FLEET][place]['rate']:.3g}/s" for place in (2, 5, 8)]
    head = ("way", f"requests/s with p95 TTFT <= {TTFT_BOUND_S:g} s", *rates)
    points = [
        [f"{one['rate']:.3g}", "+".join(map(str, one["devices"])), f"{one['forecast_s']:.3g} s",
         f"{one['ttft_s']['mean']:.3g} s"]
        for one in curves[AT_RATE]
    ]  # fmt: skip
    heads = ("requests/s", "devices of the replicas", "forecast", "simulated mean")
    return "\n\n".join((table(head, rows), table(heads, points)))


def _at(curve: Sequence[Record], place: int) -> str:
    return f"{curve[place]['ttft_s']['mean']:.3g} s" if place < len(curve) else "-"


if __name__ == "__main__":
    sys.exit(main())
