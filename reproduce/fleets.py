"""Fleets on the paper's clusters, and on 64 devices of four types.

    python -m reproduce.fleets

Every cluster is cut for its model with a batch of 64 and at most the loss of a uniform 4 bits.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from llmpq.assigner import PlanRequest
from llmpq.assigner.fleet import FleetPlan, plan_fleet
from llmpq.errors import InfeasibleError
from llmpq.spec import catalog
from llmpq.spec.cluster import cluster_of_types
from llmpq.spec.workload import Workload
from reproduce.output import Record, run, say, table
from reproduce.run_all import MODELS, Case

BATCH = 64
QUALITY_BUDGET = 1.0
LARGE = {"A100-80G": 16, "L40S": 16, "RTX4090": 16, "A10": 16}
LARGE_MODEL = "meta-llama/Llama-3.1-70B"
LARGE_BATCH = 1024


def main(argv: Sequence[str] | None = None) -> int:
    """Plan and print the table."""
    return run("fleets", __doc__, collect, report, argv)


def collect() -> Record:
    """Return the fleets of all clusters."""
    record: Record = {"batch": BATCH, "quality_budget": QUALITY_BUDGET, "clusters": []}
    for number in sorted(MODELS):
        request = Case(cluster=number).request()
        work = replace(request.workload, batch=BATCH)
        record["clusters"].append(entry(str(number), replace(request, workload=work)))
    large = PlanRequest(
        model=catalog.model(LARGE_MODEL),
        cluster=cluster_of_types(LARGE),
        workload=Workload(batch=LARGE_BATCH, prompt_tokens=512, new_tokens=128),
        dtype="bfloat16",
        kv_bits=16,
        latency="roofline",
    )
    record["clusters"].append(entry("64 devices", large))
    return record


def entry(name: str, request: PlanRequest) -> Record:
    """Return the fleet of a cluster."""
    say(f"cluster {name}")
    types = Counter(device.type for device in request.cluster.devices)
    start = time.perf_counter()
    try:
        found: FleetPlan | None = plan_fleet(replace(request, quality_budget=QUALITY_BUDGET))
    except InfeasibleError:
        found = None
    result: Record = {
        "cluster": name,
        "model": request.model.name,
        "devices": dict(types),
        "seconds": time.perf_counter() - start,
        "fleet": None,
    }
    if found is not None:
        result["fleet"] = {
            "requests_per_s": found.requests_per_s,
            "gap": found.gap,
            "searches": found.searches,
            "replicas": [_devices(replica.devices, request) for replica in found.replicas],
            "rivals": {one.name: one.requests_per_s for one in found.others},
        }
    return result


def _devices(devices: Sequence[int], request: PlanRequest) -> str:
    known = request.cluster.devices
    counts = Counter(known[device].type for device in devices)
    return " + ".join(f"{count} {name}" for name, count in counts.items())


def report(record: Record) -> str:
    """Return the table."""
    rows = []
    for item in record["clusters"]:
        found = item["fleet"]
        devices = ", ".join(f"{count} {name}" for name, count in item["devices"].items())
        head = [item["cluster"], item["model"].rpartition("/")[2], devices]
        if found is None:
            rows.append([*head, "no plan", *[""] * 7])
            continue
        replicas = Counter(found["replicas"])
        cells = [f"{count} x ({what})" for what, count in replicas.items()]
        rivals = [_relative(rate, found["requests_per_s"]) for rate in found["rivals"].values()]
        rows.append(
            [*head, ", ".join(cells), f"{found['requests_per_s']:.3g}", *rivals,
             f"{found['gap']:.1%}", f"{item['seconds']:.1f}"]
        )  # fmt: skip
    head = (
        "cluster", "model", "devices", "replicas", "requests/s", "one pipeline", "a node",
        "a device type", "a device", "gap", "seconds",
    )  # fmt: skip
    return table(head, rows)


def _relative(rate: float | None, best: float) -> str:
    if rate is None:
        return "not in time"
    return f"{rate / best:.2f}x" if rate else "-"


if __name__ == "__main__":
    sys.exit(main())
