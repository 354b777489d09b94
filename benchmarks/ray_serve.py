"""What Ray Serve costs: start, memory, time of a request, age of the routers' statistics.

    python benchmarks/ray_serve.py --folder DIR [--output FILE]

Needs ``llmpq[ray]``. A cluster of two nodes on this host serves the demo model with one replica a
node, each in one process of one thread, behind one ingress; a client sends streams to it. The age
of the statistics is read at every decision. Figures of a run are upper bounds on a busy machine,
whose load is stated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from workbench import ROOT, cpu_name

sys.path.insert(0, str(ROOT / "tests"))
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
)
START_S = time.perf_counter()

from helpers.ray_fleet import HOST, LABEL, NODES, children_of, cluster  # noqa: E402
from ray import serve  # noqa: E402

IMPORT_S = time.perf_counter() - START_S

from load import drive, sender, summary  # noqa: E402
from routers import arrivals, body_of, equal, one_worker  # noqa: E402

from llmpq.server.ray.app import application  # noqa: E402
from llmpq.server.ray.options import FleetOptions  # noqa: E402
from llmpq.server.ray.replica_table import RECORDED_S  # noqa: E402
from llmpq.server.ray.request_router import BalancedRequestRouter  # noqa: E402

AGES = "LLMPQ_BENCHMARK_AGES"
PORT = 18124
RANK = "llmpq.dist.launch.worker"


class AgeRouter(BalancedRequestRouter):
    """Writes the age of each replica's statistics at each decision."""

    async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
        """Choose as always."""
        now_s = time.time()
        found = [one.routing_stats.get(RECORDED_S) for one in candidate_replicas]
        with Path(os.environ[AGES]).open("a", encoding="ascii") as file:
            file.writelines(f"{now_s - one:.4f}\n" for one in found if one is not None)
        return await super().choose_replicas(candidate_replicas, pending_request)


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="plan and ages")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    options.folder.mkdir(parents=True, exist_ok=True)
    found = measured(options)
    print(json.dumps(found))
    if options.output is not None:
        options.output.write_text(json.dumps(record(found), indent=1) + "\n")
    return 0


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Start, load, stop; return the figures."""
    ages = options.folder / "ages.txt"
    ages.unlink(missing_ok=True)
    os.environ[AGES] = str(ages)
    plan = str(one_worker(options.folder))
    fleet = FleetOptions(
        strategies=dict.fromkeys(NODES, plan), label=LABEL, num_replicas=2,
        max_replicas_per_node=1, served_model_name="demo", engine={"step_timeout_s": 60.0},
    )  # fmt: skip
    found: dict[str, Any] = {"import_s": IMPORT_S, "load_before": os.getloadavg()[0]}
    start_s = time.perf_counter()
    with cluster():
        found["cluster_s"] = time.perf_counter() - start_s
        start_s = time.perf_counter()
        serve.start(proxy_location="HeadOnly", http_options={"host": HOST, "port": PORT})
        serve.run(application(fleet, router=AgeRouter), name="fleet")
        found["serve_s"] = time.perf_counter() - start_s
        send = sender(PORT, body_of)
        asyncio.run(drive(equal(8), send, 4))
        found["memory_mib"] = memory()
        ages.unlink(missing_ok=True)
        samples = asyncio.run(drive(arrivals(options.requests, options.rate, seed=0), send))
        found["requests"] = summary(samples)
        alone = [asyncio.run(drive(equal(1), send, 1))[0] for _ in range(20)]
        found["alone_ttft_ms"] = 1e3 * statistics.median(one.first_s - one.sent_s for one in alone)
        start_s = time.perf_counter()
    found["stop_s"] = time.perf_counter() - start_s
    values = sorted(float(line) for line in ages.read_text(encoding="ascii").splitlines())
    found["age_s"] = {
        "p50": statistics.median(values), "p95": values[int(0.95 * len(values))],
        "max": values[-1], "decisions": len(values) // 2,
    }  # fmt: skip
    return found


def memory() -> dict[str, float]:
    """Return MiB that only one process holds, by kind: ranks, replicas and ingress, Ray itself."""
    found = {"ranks": 0.0, "replicas and ingress": 0.0, "Ray": 0.0}
    for pid in children_of(os.getpid()) - {os.getpid()}:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        own = sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024
        if RANK in words:
            kind = "ranks"
        else:
            kind = "replicas and ingress" if "ServeReplica" in words else "Ray"
        found[kind] += own
    return {name: round(value) for name, value in found.items()}


def record(found: dict[str, Any]) -> dict[str, Any]:
    """Return the result file."""
    sizes, age, requests = found["memory_mib"], found["age_s"], found["requests"]
    start = f"{found['import_s']:.1f} / {found['cluster_s']:.1f} / {found['serve_s']:.1f} s"
    rows = [
        ("import Ray / start two nodes / serve the fleet", start),
        ("stop", f"{found['stop_s']:.1f} s"),
        ("memory of Ray's own processes", f"{sizes['Ray']} MiB"),
        ("memory of two replicas and the ingress, without ranks",
         f"{sizes['replicas and ingress']} MiB"),
        ("age of the statistics at a decision, p50 / p95 / largest",
         f"{age['p50']:.2f} / {age['p95']:.2f} / {age['max']:.2f} s"),
        ("time to first token of a request alone", f"{found['alone_ttft_ms']:.0f} ms"),
        ("requests answered / failed",
         f"{requests['requests'] - requests['failed']} / {requests['failed']}"),
    ]  # fmt: skip
    table = {"title": "", "columns": ["quantity", "value"], "rows": [list(row) for row in rows]}
    return {
        "topic": "ray",
        "command": "python benchmarks/ray_serve.py --folder DIR --output FILE",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{len(os.sched_getaffinity(0))} cores, {cpu_name()}, load "
        f"{found['load_before']:.1f} before",
        "versions": {"ray": version("ray"), "python": platform.python_version()},
        "tables": [table],
        "samples": found,
    }


if __name__ == "__main__":
    sys.exit(main())
