"""SAL's multi-server evaluation (GPU Half-Empty or Half-Full, Sec. 7), simulated.

    python -m reproduce.sal --traces FOLDER [--picture FILE.png]

FOLDER holds the Azure traces of 2023, as for ``reproduce.larry``. Every seed is simulated
at a rate where the 95th percentile of the time to first token under power of two choices and FCFS
is 5 to 10 times its unloaded value. Seeds run on all cores.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

from llmpq.routing import load_balancer
from llmpq.spec.workload import TraceRequest, load_trace
from reproduce.larry import ALPHA, LAWS, METRICS, ORDERS, Figures, mean_of
from reproduce.output import Record, run_on_traces, say, table
from reproduce.sal_cases import (
    ChangedSal,
    Fleet,
    FleetCase,
    different_fleet,
    equal_fleets,
    figures,
    make_case,
)

SEEDS = 5
REQUESTS = 200
"""For each server."""
BALANCERS = {
    "Random": "random",
    "round robin": "round_robin",
    "P2C": "p2c",
    "least loaded": "least_loaded",
    "LMetric": "lmetric",
    "SAL": "sal",
    "SAL in seconds": "sal_seconds",
}
RIVALS = tuple(name for name, balancer in BALANCERS.items() if not balancer.startswith("sal"))
PAPERS = tuple(name for name in BALANCERS if name not in ("LMetric", "SAL in seconds"))
"""Those of the paper, and least loaded beside them."""
SCHEDULERS = ("FCFS", "TRAIL+", "No-Preempt", "LARRY")
UNEQUAL_SCHEDULERS = ("FCFS", "LARRY")
CURVE = (0.7, 0.85, 1.0, 1.15)
"""Rates of the curves, relative to that of the comparison."""
CURVE_BALANCERS = ("Random", "P2C", "LMetric", "SAL")
CHOICE_SEEDS = 2
SHOWN = (
    (METRICS[0], "mean"), (METRICS[0], "p50"), (METRICS[0], "p95"), (METRICS[1], "p50"),
    (METRICS[2], "mean"), (METRICS[2], "p50"), (METRICS[2], "p95"),
)  # fmt: skip
"""The paper shows p50 and p95 of the times, and the first over prompt tokens; means are ours."""
TITLES = (
    "TTFT mean", "TTFT p50", "TTFT p95", "TTFT a prompt token p50", "TGT mean", "TGT p50", "TGT p95"
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Job:
    """One seed of a fleet and a law, simulated by one process.

    Attributes:
        traces: folder of the traces.
        fleet: index in ``fleets()``.
        law: name of the law.
        seed: of lengths and arrivals.
    """

    traces: Path
    fleet: int
    law: str
    seed: int


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate and print the tables."""
    return run_on_traces("sal", __doc__, _collect, report, _draw, argv)


def _draw(record: Record, path: Path) -> None:
    from reproduce.sal_pictures import draw  # noqa: PLC0415  matplotlib is extra

    draw(record, path)


def _collect(folder: Path) -> Record:
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return collect(folder, pool.map)


Play = Callable[[Callable[["Job"], Figures], Sequence["Job"]], Iterable[Figures]]


def collect(folder: Path, play: Play) -> Record:
    """Return all figures; ``play`` maps ``simulate`` over the seeds."""
    for law in LAWS:
        trace_of(folder, law)  # an error ends this process, not a worker
    jobs = [
        Job(traces=folder, fleet=fleet, law=law, seed=seed)
        for fleet in range(len(fleets()))
        for law in LAWS
        for seed in range(SEEDS)
    ]
    record: Record = {
        "alpha": ALPHA, "seeds": SEEDS, "requests_per_server": REQUESTS, "curve": CURVE,
        "cases": [], "unequal": [],
    }  # fmt: skip
    for job, run in zip(jobs, play(simulate, jobs), strict=True):
        fleet = fleets()[job.fleet]
        say(f"{fleet.name}, {job.law}, seed {job.seed}")
        kind = "cases" if fleet.is_equal else "unequal"
        if job.seed == 0:
            record[kind].append({"fleet": fleet.name, "law": job.law, "runs": []})
        record[kind][-1]["runs"].append(run)
    return record


@cache
def fleets() -> tuple[Fleet, ...]:
    """Return all fleets."""
    return (*equal_fleets(), different_fleet())


@cache
def trace_of(folder: Path, law: str) -> tuple[TraceRequest, ...]:
    """Return the trace of a law."""
    return tuple(load_trace(folder / f"AzureLLMInferenceTrace_{LAWS[law]}.csv"))


def simulate(job: Job) -> Figures:
    """Return the figures of one seed under all balancers and orders."""
    fleet = fleets()[job.fleet]
    case = make_case(fleet, trace_of(job.traces, job.law), job.seed, REQUESTS)
    equal = fleet.is_equal
    orders = SCHEDULERS if equal else UNEQUAL_SCHEDULERS
    run: Figures = {
        "rate": case.rate,
        "pressure": case.pressure(case.rate),
        "figures": {
            name: {
                balancer: case.play(chosen, ORDERS[name], case.rate)
                for balancer, chosen in BALANCERS.items()
            }
            for name in orders
        },
    }
    if equal and job.seed == 0:
        larry = ORDERS["LARRY"]
        run["curves"] = {
            balancer: [case.play(BALANCERS[balancer], larry, share * case.rate) for share in CURVE]
            for balancer in CURVE_BALANCERS
        }
    if equal and job.seed < CHOICE_SEEDS:
        run["choices"] = {name: change(case) for name, change in CHOICES.items()}
    return run


def _changed(weigh: Callable[[float, float], float]) -> Callable[[FleetCase], Figures]:
    return lambda case: figures(case.simulate(ChangedSal(weigh), ORDERS["LARRY"], case.rate))


def _polled(poll_s: float) -> Callable[[FleetCase], Figures]:
    return lambda case: figures(
        case.simulate(load_balancer("sal"), ORDERS["LARRY"], case.rate, poll_s=poll_s)
    )


CHOICES: dict[str, Callable[[FleetCase], Figures]] = {
    "sum of both waits": _changed(lambda memory, prompts: memory + prompts),
    "prompts only": _changed(lambda _, prompts: prompts),
    "memory only": _changed(lambda memory, _: memory),
    "polled every 1 s": _polled(1.0),
}
"""The free choices of the reconstruction, one changed at a time."""


def report(record: Record) -> str:
    """Return the tables."""
    parts = [_figures(entry) for entry in (*record["cases"], *record["unequal"])]
    parts += [_claims(record), _lowest(record), _ratios(record), _seconds(record)]
    parts.append(_choices(record))
    return "\n\n".join(parts)


def _figures(entry: Figures) -> str:
    runs = entry["runs"]
    rows = []
    for order, balancers in runs[0]["figures"].items():
        for balancer in balancers:
            found = [run["figures"][order][balancer] for run in runs]
            cells = [f"{mean_of(found, *shown):.3g}" for shown in SHOWN]
            rows.append([order, balancer, *cells, _percent(found)])
    rates = [run["rate"] for run in runs]
    title = f"### {entry['fleet']}, {entry['law']}: {min(rates):.2f} to {max(rates):.2f} requests/s"
    head = ("scheduler", "balancer", *(f"{title}, s" for title in TITLES), "preempted")
    return f"{title} a server\n\n{table(head, rows)}"


def _percent(found: Sequence[Figures]) -> str:
    return f"{fmean(run['preemption_rate'] for run in found):.2%}"


def _pairs(entries: Sequence[Figures], order: str, ours: str, theirs: str) -> list[Figures]:
    """Return the figures of two balancers in every run."""
    runs = [run["figures"][order] for entry in entries for run in entry["runs"]]
    return [{"ours": run[ours], "theirs": run[theirs]} for run in runs]


def _claims(record: Record) -> str:
    """Count in how many runs SAL is lower than a rival."""
    rows = []
    for order in SCHEDULERS:
        for title, (metric, place) in zip(TITLES, SHOWN, strict=True):
            row = [f"{order}: SAL's {title} is lower"]
            for rival in RIVALS:
                found = [
                    pair["ours"][metric][place] < pair["theirs"][metric][place]
                    for pair in _pairs(record["cases"], order, "SAL", rival)
                ]
                row.append(f"{sum(found)} of {len(found)}")
            rows.append(row)
    return f"### Claims: runs in which they hold\n\n{table(('claim', *RIVALS), rows)}"


def _lowest(record: Record) -> str:
    """Count in how many runs SAL with LARRY is the lowest of all combinations."""
    runs = _runs(record)
    found = [
        sum(_best_of(run["figures"], *shown) == ("LARRY", "SAL") for run in runs) for shown in SHOWN
    ]
    cells = [f"{count} of {len(runs)}" for count in found]
    return (
        f"### SAL with LARRY: runs in which it is lowest\n\n{table(TITLES, [cells])}\n\n"
        f"Of the {len(SCHEDULERS) * len(PAPERS)} combinations without LMetric and SAL in seconds."
    )


def _runs(record: Record) -> list[Figures]:
    return [run for entry in record["cases"] for run in entry["runs"]]


def _best_of(found: Figures, metric: str, place: str) -> tuple[str, str]:
    pairs = [(order, balancer) for order in found for balancer in PAPERS]
    return min(pairs, key=lambda pair: found[pair[0]][pair[1]][metric][place])


def _ratio(pairs: Sequence[Figures], metric: str, place: str) -> str:
    ratios = [pair["ours"][metric][place] / pair["theirs"][metric][place] for pair in pairs]
    return f"{fmean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _ratios(record: Record) -> str:
    rows = [
        [
            ours,
            order,
            rival,
            *(_ratio(_pairs(record["cases"], order, ours, rival), *shown) for shown in SHOWN),
        ]
        for ours in ("SAL", "SAL in seconds")
        for order in SCHEDULERS
        for rival in RIVALS
    ]
    head = ("balancer", "scheduler", "rival", *TITLES)
    return f"### SAL over its rivals: mean ratio\n\n{table(head, rows)}"


def _seconds(record: Record) -> str:
    rows = [
        [f"{entry['law']}, {order}", rival, *(_ratio(pairs, *shown) for shown in SHOWN)]
        for entry in record["unequal"]
        for order in UNEQUAL_SCHEDULERS
        for rival in (*RIVALS, "SAL")
        for pairs in [_pairs([entry], order, "SAL in seconds", rival)]
    ]
    title = "### Different servers: SAL in seconds over its rivals, mean ratio"
    return f"{title}\n\n{table(('lengths', 'rival', *TITLES), rows)}"


def _choices(record: Record) -> str:
    rows = []
    for name in CHOICES:
        row = [name]
        for metric, place in SHOWN:
            pairs = [
                {"ours": run["choices"][name], "theirs": run["figures"]["LARRY"]["SAL"]}
                for run in _runs(record)
                if "choices" in run
            ]
            row.append(_ratio(pairs, metric, place))
        rows.append(row)
    title = "### Free choices of the reconstruction, over SAL as above, with LARRY"
    return f"{title}\n\n{table(('choice', *TITLES), rows)}"


if __name__ == "__main__":
    sys.exit(main())
