"""SAL's multi-server evaluation (GPU Half-Empty or Half-Full, Sec. 7), simulated.

    python -m reproduce.sal --traces FOLDER [--picture FILE.png]

FOLDER holds the Azure traces of 2023, as for ``reproduce.larry``. Every seed is simulated
at a rate where the 95th percentile of the time to first token under power of two choices and FCFS
is 5 to 10 times its unloaded value. Seeds run on all cores.

Servers are equal, as in the paper, or different. Arrivals are those of the single-server
evaluation, with as many requests for each server.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import fmean

from llmpq.batching import percentile
from llmpq.batching.queue_order import QueueOrder, queue_order
from llmpq.routing import LoadBalancer, RoutedRequest, WorkloadMeans, load_balancer
from llmpq.routing.balancers import Replicas, freed_tokens
from llmpq.sim.engine import simulate_engine
from llmpq.sim.fleet import FleetReplica, FleetReport, simulate_fleet
from llmpq.spec.runtime_constants import POLL_S
from llmpq.spec.workload import TraceRequest, load_trace, scale_rate
from reproduce.larry import (
    ALPHA,
    KEPT,
    LAWS,
    LIMITS,
    METRICS,
    ORDERS,
    Figures,
    Server,
    a100_server,
    draw_requests,
    h100_server,
    llama_8b_server,
    mean_of,
    rate_of_pressure,
)
from reproduce.output import Record, run_on_data, say, table

# --- Fleets and runs ---


REFERENCE = "p2c", "fcfs"
"""Balancer and order that choose the rate of a case."""
START_RATE = 5.0


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Servers behind one load balancer.

    Attributes:
        name: of servers and model.
        servers: at least one.
    """

    name: str
    servers: tuple[Server, ...]

    @property
    def is_equal(self) -> bool:
        """Whether all servers are of one type."""
        return len({server.name for server in self.servers}) == 1


def equal_fleets() -> tuple[Fleet, ...]:
    """Return the fleets of the paper."""
    return (
        Fleet(name="Llama-3-8B, 8 A100-40G", servers=(a100_server(),) * 8),
        Fleet(name="Llama-3-70B FP8, 4 x 2 H100", servers=(h100_server(),) * 4),
    )


def different_fleet() -> Fleet:
    """Return eight servers of four types; the paper has none."""
    types = ("A100-40G", "L40S", "RTX4090", "L4")
    servers = (server for name in types for server in (llama_8b_server(name),) * 2)
    return Fleet(name="Llama-3-8B, 2 each of A100-40G, L40S, RTX4090, L4", servers=tuple(servers))


@dataclass(frozen=True, kw_only=True)
class FleetCase:
    """A fleet, a law of lengths and a seed.

    Attributes:
        fleet: the servers.
        seed: of lengths, arrivals and random balancers.
        requests: at a mean rate of 1 a second for each server.
        longest: longest answer of the law, which No-Preempt reserves.
    """

    fleet: Fleet
    seed: int
    requests: tuple[TraceRequest, ...]
    longest: int

    def play(self, balancer: str, order: QueueOrder, rate: float) -> Figures:
        """Simulate at a mean rate for each server."""
        return figures(self.simulate(load_balancer(balancer, seed=self.seed), order, rate))

    def simulate(
        self, balancer: LoadBalancer, order: QueueOrder, rate: float, *, poll_s: float = POLL_S
    ) -> FleetReport:
        """Simulate with any balancer, at a mean rate for each server."""
        replicas = [
            FleetReplica(
                costs=server.costs,
                limits=replace(LIMITS, num_blocks=server.num_blocks),
                order=order,
            )
            for server in self.fleet.servers
        ]
        return simulate_fleet(
            replicas,
            balancer,
            scale_rate(self.requests, rate),
            poll_s=poll_s,
            max_tokens=self.longest if order.reserves_answer else None,
        )

    @cached_property
    def unloaded_s(self) -> float:
        """95th percentile of the time to first token when every request is alone, in turn."""
        alone = [replace(item, new_tokens=1) for item in scale_rate(self.requests, 1e-3)]
        count = len(self.fleet.servers)
        times: list[float] = []
        for place, server in enumerate(self.fleet.servers):
            limits = replace(LIMITS, num_blocks=server.num_blocks)
            own = simulate_engine(server.costs, limits, queue_order("fcfs"), alone[place::count])
            times += own.time_to_first_token_s
        return percentile(times, 95)

    @cached_property
    def rate(self) -> float:
        """Requests a second for each server at which the reference is under pressure."""
        return rate_of_pressure(self.pressure, START_RATE)

    def pressure(self, rate: float) -> float:
        """Return the reference's p95 of the time to first token over the unloaded one."""
        balancer, order = REFERENCE
        found = self.play(balancer, queue_order(order), rate)
        value: float = found[METRICS[0]]["p95"]
        return value / self.unloaded_s


def figures(report: FleetReport) -> Figures:
    """Return what the tables need."""
    found = report.total.engine_json()
    return {name: found[name] for name in KEPT} | {
        "shares": [
            report.routed.count(number) / len(report.routed)
            for number in range(len(report.replicas))
        ]
    }


def make_case(
    fleet: Fleet, trace: Sequence[TraceRequest], seed: int, requests_per_server: int
) -> FleetCase:
    """Return the case of a seed."""
    servers = len(fleet.servers)
    requests = draw_requests(trace, requests_per_server * servers, seed, "two_state", servers)
    longest = max(item.new_tokens for item in trace)
    return FleetCase(fleet=fleet, seed=seed, requests=requests, longest=longest)


Weigh = Callable[[float, float], float]


class ChangedSal:
    """SAL with another rule: the load is ``weigh(steps for memory, steps for prompts)``.

    Args:
        weigh: returns the load.
        by_index: break ties by the index only.
    """

    def __init__(self, weigh: Weigh, *, by_index: bool = False) -> None:
        self._weigh = weigh
        self._by_index = by_index

    def rank(self, request: RoutedRequest, replicas: Replicas, means: WorkloadMeans) -> list[int]:
        """Return the numbers of the replicas, the best one first."""
        tokens = request.prompt_tokens

        def key(number: int) -> tuple[float, int, int]:
            view = replicas[number]
            capacity = view.capacity
            memory = max(0, tokens - view.free_tokens) / freed_tokens(capacity.kv_tokens, means)
            prompts = (view.queued_tokens + tokens) / capacity.token_budget
            used = 0 if self._by_index else capacity.kv_tokens - view.free_tokens
            return self._weigh(memory, prompts), used, number

        return sorted(replicas, key=key)

    def routed(self, request: RoutedRequest, number: int) -> None:
        """Take no note."""


# --- The evaluation ---


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
    return run_on_data("sal", __doc__, _collect, report, _draw, argv, option="--traces")


def _draw(record: Record, path: Path) -> None:
    from reproduce.pictures import draw_sal  # noqa: PLC0415  matplotlib is extra

    draw_sal(record, path)


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
