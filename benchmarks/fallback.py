"""Compare the integer programs of HiGHS, the planner's fallback, with the exact search.

    OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 python benchmarks/fallback.py

The paper's clusters and models, each with equal layers (the default degradation) and with different
ones (seeded). Costs are the rooflines of the cost model. Seconds are CPU seconds of this process,
from the built task to the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
from exact_planner import CLUSTERS, PAPER_MODELS, uneven

from llmpq import __version__
from llmpq.assigner.constraints.resolve import NEVER
from llmpq.assigner.exact.search import find_exact
from llmpq.assigner.milp.search import find_plan
from llmpq.assigner.request import DEFAULT_GAP, PlanningTask, PlanRequest, build_task, silent
from llmpq.spec import catalog
from llmpq.spec.cluster import load_cluster
from llmpq.spec.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One cluster planned by both; ``difference`` is relative to the exact value."""

    cluster: str
    degradations: str
    exact_s: float
    highs_s: float
    difference: float
    status: str
    gap: float
    programs: int
    exact_cpu_s: float
    highs_cpu_s: float


def main(argv: list[str] | None = None) -> int:
    """Plan every case both ways, print a table, and write JSON when asked."""
    options = _parse(argv)
    sys.stdout.write(_HEAD)
    figures = []
    for number, name, task in _tasks(options):
        figures.append(_figure(f"paper-{number:02d}", name, task, options.time_limit_s))
        sys.stdout.write(_line(figures[-1]))
        sys.stdout.flush()
    if figures:
        sys.stdout.write(
            f"worst difference {max(f.difference for f in figures):.1e}, "
            f"most CPU seconds {max(f.highs_cpu_s for f in figures):.2f}\n"
        )
    if options.json is not None:
        document = {
            "provenance": _provenance(options),
            "figures": [asdict(figure) for figure in figures],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--clusters", type=int, nargs="+", choices=PAPER_MODELS, default=sorted(PAPER_MODELS)
    )
    parser.add_argument(
        "--degradations", choices=("even", "uneven"), nargs="+", default=["even", "uneven"]
    )
    parser.add_argument("--gap", type=float, default=DEFAULT_GAP, help="relative, of the fallback")
    parser.add_argument("--time_limit_s", type=float, help="seconds a cluster, of the fallback")
    parser.add_argument("--seed", type=int, default=0, help="of the uneven degradations")
    parser.add_argument("--json", type=Path, help="write figures and provenance here")
    return parser.parse_args(argv)


def _tasks(options: argparse.Namespace) -> Iterator[tuple[int, str, PlanningTask]]:
    """Yield number of the cluster, name of the degradations, and the task."""
    for number in options.clusters:
        request = PlanRequest(
            model=catalog.model(PAPER_MODELS[number]),
            cluster=load_cluster(CLUSTERS / f"paper-{number:02d}.json"),
            workload=Workload(batch=32, prompt_tokens=512, new_tokens=100),
            dtype="float16",
            kv_bits=16,
            solver="highs",
            gap=options.gap,
        )
        task = build_task(request)
        for name in options.degradations:
            if name == "uneven":
                rng = np.random.default_rng(options.seed)
                task = replace(task, omega=uneven(task.space, rng))
            yield number, name, task


def _figure(cluster: str, name: str, task: PlanningTask, time_limit_s: float | None) -> Figure:
    started = time.process_time()
    exact = find_exact(replace(task, request=replace(task.request, gap=0.0)), silent)
    between = time.process_time()
    deadline = NEVER.within(time_limit_s)
    limited = replace(task, request=replace(task.request, deadline=deadline))
    found = find_plan(limited, silent)
    ended = time.process_time()
    assert exact.solver == "exact"
    assert found.bound_s is not None
    best_s, found_s = exact.evaluation.objective_s, found.evaluation.objective_s
    return Figure(
        cluster=cluster,
        degradations=name,
        exact_s=best_s,
        highs_s=found_s,
        difference=found_s / best_s - 1,
        status=found.status,
        gap=1 - found.bound_s / found_s,
        programs=found.pairs_searched,
        exact_cpu_s=between - started,
        highs_cpu_s=ended - between,
    )


_HEAD = (
    f"{'cluster':<10}{'degradations':<14}{'exact s':>12}{'HiGHS s':>12}{'difference':>12}"
    f"{'status':>10}{'gap':>9}{'programs':>10}{'exact CPU s':>13}{'HiGHS CPU s':>13}\n"
)


def _line(f: Figure) -> str:
    return (
        f"{f.cluster:<10}{f.degradations:<14}{f.exact_s:>12.4f}{f.highs_s:>12.4f}"
        f"{f.difference:>12.1e}{f.status:>10}{f.gap:>9.1e}{f.programs:>10}{f.exact_cpu_s:>13.2f}"
        f"{f.highs_cpu_s:>13.2f}\n"
    )


def _provenance(options: argparse.Namespace) -> dict[str, object]:
    return {
        "llmpq": __version__,
        "highspy": version("highspy"),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "gap": options.gap,
        "time_limit_s": options.time_limit_s,
        "seed": options.seed,
    }


if __name__ == "__main__":
    sys.exit(main())
