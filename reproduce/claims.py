"""The figures of the result files that can be made again here: where they stand, and how.

A claim is a part of a result file in ``benchmarks/results``: a row, a seed or a case, with all of
its figures that do not depend on time. It is made again by the functions that made the result. The
claims are derived from the rows of the files, so that a new row is a new claim.

Simulations, plans and fits are equal on every machine, up to the digits that were recorded.
Seconds are compared with the recorded ones, widened by a factor, and only on the same kind of
processor. A search that ends after some seconds is compared with a stated tolerance.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from llmpq.spec.workload import TraceRequest
from reproduce import (
    exegpt,
    fleets,
    flexgen,
    larry,
    llm_pq_kernels,
    multibin,
    run_all,
    sal,
    samullm,
    vllm_run,
)
from scripts.docs_site import evidence

Json = Any
Place = tuple[str | int, ...]
"""Keys and indices that lead to figures of a result file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How far a figure may be from the recorded one.

    Attributes:
        relative: largest relative difference of a number.
        is_rounded: half a unit of the last recorded digit is allowed, too.
        factor: of measured seconds: from the least recorded one over it to the largest times it.
        processor: that was measured on; empty where nothing is measured.
    """

    relative: float = 1e-6
    is_rounded: bool = False
    factor: float = 1.0
    processor: str = ""


EXACT = Spread()
"""Files keep seven significant digits."""
ROUNDED = Spread(is_rounded=True)
TIMED_SEARCH = Spread(relative=0.05)
"""Of searches that end after some seconds: what they find depends on the processor."""
WIDENED = 2.0
"""Measured seconds: the virtual machines differ by up to 1.6 times from minute to minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A part of a result file, and what makes it again.

    Attributes:
        topic: name of the result file.
        kind: which part of the file; claims of a kind take about equally long.
        name: which one, unique within the kind.
        path: keys and indices that lead to the recorded figures in the file.
        compute: returns the same figures, or some of them; takes the folder of external data.
        seconds: expected; see ``check_claims`` for recorded ones.
        data: folders that it reads within the external data.
        spread: allowed difference.
    """

    topic: str
    kind: str
    name: str
    path: Place
    compute: Callable[[Path], Json]
    seconds: float
    data: tuple[str, ...] = ()
    spread: Spread = EXACT

    @property
    def title(self) -> str:
        """Topic, kind and name."""
        return f"{self.topic}: {self.kind}, {self.name}"


def document(topic: str) -> Json:
    """Return a result file."""
    return json.loads((evidence.RESULTS / f"{topic}.json").read_text(encoding="utf-8"))


def claims() -> list[Claim]:
    """Return all claims, topic by topic."""
    return [claim for topic, of in TOPICS.items() for claim in of(document(topic))]


# --- LLM-PQ ---


def llm_pq(found: Json) -> Iterator[Claim]:
    """Yield the rows of Tables 4, 5, 7, 8 and 10, of Figures 8 and 9 and of the formulas."""
    record = found["record"]
    claim = partial(Claim, topic="llm-pq")
    for name, rows in record["serving"].items():
        workload = run_all.SERVING_TABLES[name.removeprefix("table ")][2]
        for at, row in enumerate(rows):
            case = run_all.Case(cluster=row["cluster"], workload=workload)
            yield claim(
                kind="serving", name=f"{name}, cluster {row['cluster']}, {row['scheme']}",
                path=("record", "serving", name, at), seconds=0.5,
                compute=_without_data(served, case, row["scheme"]),
            )  # fmt: skip
    for at, row in enumerate(record["solving"]["table 8"]):
        yield claim(
            kind="table 8", name=f"cluster {row['cluster']}, {row['variant']}",
            path=("record", "solving", "table 8", at, "ours"), seconds=2.0, spread=ROUNDED,
            compute=_without_data(grouped, row["cluster"], row["variant"]),
        )  # fmt: skip
    for at, row in enumerate(record["solving"]["table 10"]):
        name = f"{SOLVED}, different layers"
        yield claim(
            kind="table 10", name=f"cluster {row['cluster']}, seconds",
            path=("record", "solving", "table 10", at, "ours", name, "solving_s"), seconds=0.5,
            spread=Spread(factor=WIDENED, processor=found["machine"]),
            compute=_without_data(solving_s, row["cluster"]),
        )  # fmt: skip
    yield claim(
        kind="table 10", name="three nodes, objective",
        path=("record", "solving", "three nodes", "llmpq by exact", "objective_s"), seconds=2.0,
        spread=ROUNDED, compute=_without_data(three_nodes),
    )  # fmt: skip
    for name, points in record["theta_sweep"].items():
        for at, point in enumerate(points):
            yield claim(
                kind="figure 8", name=f"{name}, {point['multiple']} times the price",
                path=("record", "theta_sweep", name, at), seconds=0.4, spread=ROUNDED,
                compute=_without_data(priced, int(name.split()[-1]), point["multiple"]),
            )  # fmt: skip
    for at, row in enumerate(record["adaptive_only"]["rows"]):
        case = run_all.Case(cluster=row["cluster"], workload=row["workload"])
        yield claim(
            kind="figure 9", name=f"cluster {row['cluster']}",
            path=("record", "adaptive_only", "rows", at), seconds=0.6,
            compute=_without_data(beside_adabits, case),
        )  # fmt: skip
    for at, row in enumerate(record["formula"]["ours"]):
        yield claim(
            kind="formula", name=f"cluster {row['cluster']}",
            path=("record", "formula", "ours", at), seconds=0.4,
            compute=_without_data(run_all._ours, row["cluster"]),
        )  # fmt: skip


SOLVED = "llmpq by exact"


def served(case: run_all.Case, scheme: str) -> Json:
    """Return what a scheme's plan takes and loses."""
    plans: Mapping[str, Callable[[], Any]] = {
        run_all.RIVAL: lambda: run_all._pipeedge_of_the_paper(case),
        run_all.RIVAL_AT_BEST: lambda: run_all.plan_of(case, "pipeedge"),
        "Uniform": lambda: run_all.plan_of(case, "uniform"),
        run_all.OURS: lambda: run_all.plan_of(case, "llmpq"),
        run_all.OURS_AT_EQUAL_QUALITY: lambda: run_all._no_worse_than(
            run_all._pipeedge_of_the_paper(case), case
        ),
        run_all.OURS_AT_BEST: lambda: run_all._no_worse_than(
            run_all.plan_of(case, "pipeedge"), case
        ),
    }
    plan = plans[scheme]()
    return {
        "omega": plan and plan.estimate.quality,
        "latency_s": plan and plan.estimate.latency_s,
        "tokens_per_s": plan and plan.throughput_tokens_per_s,
    }


def grouped(cluster: int, variant: str) -> Json:
    """Return what a variant of Table 8 finds."""
    case = run_all.Case(cluster=cluster)
    method, group = run_all.VARIANTS[variant]
    theta_s = run_all._solve(case.request(), "llmpq").plan.search.theta_s
    request = case.request(theta_s=theta_s, layer_group=group, time_limit_s=run_all.TIME_LIMIT_S)
    plan = run_all._solve(request, method).plan
    return {"tokens_per_s": plan.throughput_tokens_per_s, "objective_s": plan.estimate.objective_s}


def solving_s(cluster: int) -> float:
    """Return the processor seconds of the exact search, layers different (Table 10)."""
    case = run_all.Case(cluster=cluster)
    sensitivity = run_all._uneven(case.request().model)
    request = case.request(sensitivity=sensitivity, time_limit_s=run_all.TIME_LIMIT_S)
    return run_all._solve(request, "llmpq").cpu_s


def three_nodes() -> float:
    """Return the objective of the plan for three nodes (A.2.2)."""
    solved = run_all.three_nodes("exact", "llmpq")
    assert solved is not None
    return solved.plan.estimate.objective_s


def priced(cluster: int, multiple: float) -> Json:
    """Return a point of Figure 8."""
    case = run_all.Case(cluster=cluster)
    theta_s = multiple * run_all.plan_of(case, "llmpq").search.theta_s
    plan = run_all.make_plan(case.request(theta_s=theta_s))
    return {
        "theta_s": plan.search.theta_s,
        "tokens_per_s": plan.throughput_tokens_per_s,
        "omega": plan.estimate.quality,
    }


def beside_adabits(case: run_all.Case) -> Json:
    """Return a bar of Figure 9."""
    plans = {method: run_all.plan_of(case, method) for method in run_all.ADAPTIVE}
    return {
        f"{method}_{name}": value
        for method, plan in plans.items()
        for name, value in (
            ("tokens_per_s", plan.throughput_tokens_per_s),
            ("omega", plan.estimate.quality),
        )
    }


# --- ExeGPT ---


def exegpt_claims(found: Json) -> Iterator[Claim]:
    """Yield the schedules of Figures 6 to 8 and of Table 6, and rows of other tables."""
    record = found["record"]
    claim = partial(Claim, topic="exegpt")
    for at, row in enumerate(record["bounds"]):
        bound = "no bound" if row["bound_s"] is None else f"{row['bound_s']:.3f} s"
        label = f"{row['case']}, {row['task']}, {bound}"
        for name, one in row["schedules"].items():
            yield claim(
                kind="figures 6 and 8", name=f"{label}, {name}",
                path=("record", "bounds", at, "schedules", name), seconds=20.0,
                compute=_without_data(
                    scheduled, row["case"], row["task"], tuple(one["layout"]), row["bound_s"], name
                ),
            )  # fmt: skip
        if row["static"]:
            yield claim(
                kind="static batches", name=label, path=("record", "bounds", at, "static"),
                seconds=2.0,
                compute=_without_data(
                    static_batch, row["case"], row["task"], row["static"]["batch"]
                ),
            )  # fmt: skip
    for at, row in enumerate(record["table 6"]):
        if row["ours"]:
            policy, layout = row["ours"]["policy"], tuple(row["ours"]["layout"])
            yield claim(
                kind="table 6", name=f"{row['bound_s'] or 'no bound'}, {policy}",
                path=("record", "table 6", at, "ours"), seconds=20.0,
                compute=_without_data(
                    scheduled, exegpt.OPT.name, "S", layout, row["bound_s"], policy
                ),
            )  # fmt: skip
    for at, row in enumerate(record.get("figure 7", [])):
        yield claim(
            kind="figure 7", name=f"{row['task']}, {row['bound_s'] or 'no bound'}",
            path=("record", "figure 7", at), seconds=30.0,
            compute=_without_data(of_rivals, row["task"], at % (len(exegpt.OPT.quantiles) + 1)),
        )  # fmt: skip


@cache
def case_named(name: str) -> exegpt.Case:
    """Return a model on its machines."""
    return next(one for one in exegpt.CASES if one.name == name)


def scheduled(
    case: str, task: str, layout: tuple[int, ...], bound_s: float | None, name: str
) -> Json:
    """Return a schedule as found and played."""
    wanted = math.inf if bound_s is None else bound_s
    policy = next(one for one in exegpt.POLICIES if exegpt.NAMES[one] == name)
    found = exegpt.row_of(case_named(case), task, layout, wanted, policy)
    return found | {"layout": list(layout)}


def static_batch(case: str, task: str, batch: int) -> Json:
    """Return the rate of static batches of a size."""
    base = exegpt.baseline(case_named(case), task)
    made = base.play(base.static(batch), pads_prompts=True)
    return {"requests_per_s": made.throughput_requests_per_s}


@cache
def _rivals(task: str) -> list[Json]:
    return exegpt.rivals(task)


def of_rivals(task: str, place: int) -> Json:
    """Return the rates of other systems' policies under a bound."""
    return _rivals(task)[place]


# --- LARRY ---


def larry_claims(found: Json) -> Iterator[Claim]:
    """Yield rates, orders, values of alpha, curves and free choices."""
    record = found["record"]
    claim = partial(Claim, topic="larry", data=("azure",))
    for at, case in enumerate(record["cases"]):
        key, path = (at, case["law"]), ("record", "cases", at)
        label = f"{case['server']}, {case['law']}"
        for seed in range(record["seeds"]):
            yield claim(
                kind="rate", name=f"{label}, seed {seed}", path=(*path, "rate", seed), seconds=5.0,
                compute=partial(larry_rate, key, seed),
            )  # fmt: skip
            for name in case["orders"]:
                yield claim(
                    kind="order", name=f"{label}, {name}, seed {seed}",
                    path=(*path, "orders", name, seed), seconds=2.0,
                    compute=partial(ordered, key, name, seed),
                )  # fmt: skip
        for alpha, runs in case["alphas"].items():
            yield claim(
                kind="alpha", name=f"{label}, alpha {alpha}", path=(*path, "alphas", alpha),
                seconds=3.0, compute=partial(with_alpha, key, alpha, len(runs)),
            )  # fmt: skip
        for name, points in case["curves"].items():
            for place, runs in enumerate(points):
                share = record["curve"][place]
                yield claim(
                    kind="curve", name=f"{label}, {name}, {share} of the rate",
                    path=(*path, "curves", name, place), seconds=2.0,
                    compute=partial(at_rate, key, name, share, len(runs)),
                )  # fmt: skip
    for at, row in enumerate(record["choices"]):
        yield claim(
            kind="choice", name=f"{row['choice']}, {row['law']}", path=("record", "choices", at),
            seconds=15.0, compute=partial(chosen, row["choice"], row["law"]),
        )  # fmt: skip


Key = tuple[int, str]
"""Place of a case in the record, and its law of lengths; two places a server."""


@cache
def traces(data: Path) -> Mapping[str, Sequence[TraceRequest]]:
    """Return the Azure traces by the law of their lengths."""
    return {law: sal.trace_of(data / "azure", law) for law in larry.LAWS}


@cache
def larry_case(data: Path, key: Key, seed: int) -> larry.Case:
    """Return a server, a law and a seed."""
    server = (larry.a100_server, larry.h100_server)[key[0] // len(larry.LAWS)]()
    return larry.make_case(server, key[1], traces(data)[key[1]], seed)


def larry_rate(key: Key, seed: int, data: Path) -> Json:
    """Return the rate of the comparison."""
    return larry_case(data, key, seed).rate


def ordered(key: Key, name: str, seed: int, data: Path) -> Json:
    """Return the figures of an order."""
    case = larry_case(data, key, seed)
    return case.play(larry.ORDERS[name], case.rate)


def with_alpha(key: Key, alpha: str, seeds: int, data: Path) -> Json:
    """Return LARRY's figures with an alpha, by seed."""
    order = larry.larry_order(alpha=float(alpha))
    cases = [larry_case(data, key, seed) for seed in range(seeds)]
    return [case.play(order, case.rate) for case in cases]


def at_rate(key: Key, name: str, share: float, seeds: int, data: Path) -> Json:
    """Return the figures of an order at a share of the rate, by seed."""
    cases = [larry_case(data, key, seed) for seed in range(seeds)]
    return [case.play(larry.ORDERS[name], share * case.rate) for case in cases]


def chosen(title: str, law: str, data: Path) -> Json:
    """Return LARRY over FCFS under another choice."""
    key = list(larry.LAWS).index(law), law
    cases = [larry_case(data, key, seed) for seed in range(larry.CURVE_SEEDS)]
    return larry.compared(cases, larry.choices(traces(data))[title])


# --- SAL ---


def sal_claims(found: Json) -> Iterator[Claim]:
    """Yield rates, schedulers with all balancers, curves and free choices."""
    record = found["record"]
    claim = partial(Claim, topic="sal", data=("azure",))
    for kind in ("cases", "unequal"):
        for at, case in enumerate(record[kind]):
            for seed, run in enumerate(case["runs"]):
                path = ("record", kind, at, "runs", seed)
                label = f"{case['fleet']}, {case['law']}, seed {seed}"
                fleet = (case["fleet"], case["law"], seed)
                yield claim(
                    kind="rate", name=label, path=(*path, "rate"), seconds=5.0,
                    compute=partial(sal_rate, fleet),
                )  # fmt: skip
                for order in run["figures"]:
                    yield claim(
                        kind="balancers", name=f"{label}, {order}",
                        path=(*path, "figures", order), seconds=9.0,
                        compute=partial(balanced, fleet, order),
                    )  # fmt: skip
                for balancer in run.get("curves", {}):
                    yield claim(
                        kind="curve", name=f"{label}, {balancer}",
                        path=(*path, "curves", balancer), seconds=4.0,
                        compute=partial(sal_curve, fleet, balancer),
                    )  # fmt: skip
                for choice in run.get("choices", {}):
                    yield claim(
                        kind="choice", name=f"{label}, {choice}",
                        path=(*path, "choices", choice), seconds=2.0,
                        compute=partial(sal_choice, fleet, choice),
                    )  # fmt: skip


FleetKey = tuple[str, str, int]
"""Fleet, law of lengths, seed."""


@cache
def fleet_case(data: Path, key: FleetKey) -> sal.FleetCase:
    """Return a fleet, a law and a seed."""
    name, law, seed = key
    (fleet,) = (one for one in sal.fleets() if one.name == name)
    return sal.make_case(fleet, traces(data)[law], seed, sal.REQUESTS)


def sal_rate(key: FleetKey, data: Path) -> Json:
    """Return the rate of the comparison."""
    return fleet_case(data, key).rate


def balanced(key: FleetKey, order: str, data: Path) -> Json:
    """Return the figures of all balancers with an order."""
    case = fleet_case(data, key)
    return {
        name: case.play(balancer, sal.ORDERS[order], case.rate)
        for name, balancer in sal.BALANCERS.items()
    }


def sal_curve(key: FleetKey, balancer: str, data: Path) -> Json:
    """Return a balancer's figures over the rate."""
    case, order = fleet_case(data, key), sal.ORDERS["LARRY"]
    name = sal.BALANCERS[balancer]
    return [case.play(name, order, share * case.rate) for share in sal.CURVE]


def sal_choice(key: FleetKey, choice: str, data: Path) -> Json:
    """Return SAL's figures under another choice."""
    return sal.CHOICES[choice](fleet_case(data, key))


# --- SamuLLM ---


def samullm_claims(found: Json) -> Iterator[Claim]:
    """Yield methods of all applications, and ablations."""
    record = found["record"]
    for at, case in enumerate(record["cases"]):
        for method in samullm.METHODS:
            path = ("record", "cases", at, method)
            yield _application(case["name"], method, samullm.AS_PLANNED, path)
    for name, methods in record["ablations"].items():
        for method, variants in methods.items():
            for variant in variants:
                path = ("record", "ablations", name, method, variant)
                yield _application(name, method, variant, path)
    for name, searches in record["searches"].items():
        for sequences in searches:
            yield Claim(
                topic="samullm", kind="search of the code", name=f"{name}, {sequences} sequences",
                path=("record", "searches", name, sequences), seconds=4.0, data=("samullm",),
                compute=partial(searched_by_code, name, int(sequences)),
            )  # fmt: skip


def searched_by_code(name: str, sequences: int, data: Path) -> Json:
    """Return what the search of the authors' code finds."""
    with tempfile.TemporaryDirectory() as folder:
        bench = samullm._Bench(samullm.Cases(data / "samullm", Path(folder)), 20.0, None)
        return bench.searched(name, sequences)


def _application(name: str, method: str, variant: str, path: Place) -> Claim:
    is_timed = method == "greedy"
    return Claim(
        topic="samullm", kind="our search" if is_timed else "rules",
        name=f"{path[1]}, {name}, {samullm.NAMES[method]}, {variant}", path=path,
        seconds=25.0 if is_timed else 4.0, data=("samullm",),
        spread=TIMED_SEARCH if is_timed else EXACT,
        compute=partial(played, name, method, variant),
    )  # fmt: skip


def played(name: str, method: str, variant: str, data: Path) -> Json:
    """Return an application's figures, without the seconds of the search."""
    every = (*samullm.CASES, *samullm.ABLATIONS)
    case = next(one for one in every if one.name == name)
    with tempfile.TemporaryDirectory() as folder:
        bench = samullm._Bench(samullm.Cases(data / "samullm", Path(folder)), 20.0, None)
        found = bench._figures(case, method, variant)
    kept_figures = ("predicted_s", "played_s", "bound_s")
    if method != "greedy":
        kept_figures += ("idle_s", "stages")
    return {figure: found[figure] for figure in kept_figures}


def iteration_claims(found: Json) -> Iterator[Claim]:
    """Yield the errors of every table of iterations, and of all together."""
    claim = partial(Claim, topic="iteration-costs", data=("samullm",))
    for name in found["record"]["tables"]:
        yield claim(
            kind="table", name=name, path=("record", "tables", name), seconds=0.5,
            compute=partial(table_errors, name),
        )  # fmt: skip
    yield claim(
        kind="all tables", name="together", path=("record", "all"), seconds=10.0,
        compute=all_errors,
    )  # fmt: skip


def table_errors(name: str, data: Path) -> Json:
    """Return the errors of one table, and the share that the three parts leave out."""
    from benchmarks import iteration_costs as costs  # noqa: PLC0415  an evaluation of its own

    file = data / "samullm" / "iterations" / f"{name}.csv.gz"
    return {
        f"{phase} {form}": costs.summary(values)
        for (phase, form), values in costs.errors(file).items()
    } | {"decode overhead share": costs.overhead_share(file)}


def all_errors(data: Path) -> Json:
    """Return the errors of all tables together."""
    from benchmarks import iteration_costs as costs  # noqa: PLC0415

    return costs.collect(data / "samullm")["all"]


# --- Multi-bin batching ---


DATA_OF: Mapping[str, tuple[str, ...]] = {
    name: ("helix",) if name == "Alpaca" else ("azure",) for name in multibin.DATA
}


def multibin_claims(found: Json) -> Iterator[Claim]:
    """Yield the points of all figures, and the bins of Theorem 4.3."""
    record = found["record"]
    claim = partial(Claim, topic="multibin")
    curves: Mapping[str, Callable[[int], Json]] = {
        "figures 3, 4": uniform_curve,
        "figure 6": token_curve,
        "figure 9": exponential_curve,
    }
    for figure, compute in curves.items():
        for at, row in enumerate(record[figure]):
            yield claim(
                kind=figure, name=f"{row['bins']} bins", path=("record", figure, at), seconds=1.0,
                compute=_without_data(compute, row["bins"]),
            )  # fmt: skip
    for at, row in enumerate(record["figure 8"]):
        yield claim(
            kind="figure 8", name=f"{row['bins']} bins, error {row['error']}",
            path=("record", "figure 8", at, "rate"), seconds=0.2,
            compute=_without_data(uniform_rate, row["bins"], row["error"]),
        )  # fmt: skip
    for at, row in enumerate(record["table 1"]):
        for name, error in (("rate", 1 - row["accuracy"]), ("oracle", 0.0)):
            yield claim(
                kind="table 1", name=f"{row['bins']} bins, {name}",
                path=("record", "table 1", at, name), seconds=0.2,
                compute=_without_data(uniform_rate, row["bins"], error),
            )  # fmt: skip
    yield claim(
        kind="figure 1a", name="tokens a second", path=("record", "figure 1a"), seconds=2.0,
        compute=_without_data(multibin.batch_rates),
    )  # fmt: skip
    yield claim(
        kind="figure 5", name="seconds", path=("record", "figure 5"), seconds=2.0,
        compute=_without_data(multibin.answer_seconds),
    )  # fmt: skip
    for at, row in enumerate(record["figure 10"]):
        yield claim(
            kind="figure 10", name=row["data"], path=("record", "figure 10", at), seconds=5.0,
            compute=partial(multibin.score_of, name=row["data"]), data=DATA_OF[row["data"]],
        )  # fmt: skip
    for at, row in enumerate(record["figures 7, 11"]):
        asked = {"name": row["data"], "model_name": row["model"], "bins": row["bins"]}
        yield claim(
            kind="figures 7, 11", name=f"{row['data']}, {row['model']}, {row['bins']} bins",
            path=("record", "figures 7, 11", at, "rates"), seconds=25.0,
            compute=partial(multibin.rates_of, **asked), data=DATA_OF[row["data"]],
        )  # fmt: skip
    yield claim(
        kind="theorem 4.3", name="bins for 95 %", path=("record", "bins for 95 %"), seconds=0.1,
        compute=_without_data(bins_for_95),
    )  # fmt: skip


def _most() -> float:
    return multibin.BATCH / ((multibin.SHORTEST_S + multibin.LONGEST_S) / 2)


def uniform_curve(bins: int) -> Json:
    """Return throughput and latency with uniform service times."""
    curve = multibin._curve(multibin._uniform(bins), _most())
    return {**curve, "theorem": multibin._theorem(bins)}


def token_curve(bins: int) -> Json:
    """Return throughput and latency with times linear in answers."""
    return multibin._curve(multibin._tokens(bins), multibin._tokens_best())


def exponential_curve(bins: int) -> Json:
    """Return throughput and latency with exponential service times."""
    queue = multibin._exponential(bins)
    return multibin._curve(queue, multibin.BATCH / multibin.MEAN_S)


def uniform_rate(bins: int, error: float) -> Json:
    """Return the throughput where some requests are in a neighbouring bin."""
    return multibin._rate(multibin._uniform(bins, error))


def bins_for_95() -> Json:
    """Return the bins of 95 % of the throughput without waste."""
    shortest_s, longest_s = multibin.SHORTEST_S, multibin.LONGEST_S
    return multibin.bins_needed(shortest_s, longest_s, multibin.BATCH, 0.95 * _most())


# --- LLM-PQ with the paper's kernels ---


def kernel_claims(found: Json) -> Iterator[Claim]:
    """Yield the timed layers, the rows of the tables by cluster, and the logged runs."""
    record = found["record"]
    claim = partial(Claim, topic="llm-pq-kernels")
    yield claim(
        kind="layers", name="all", path=("record", "layers"), seconds=1.0,
        compute=_without_data(llm_pq_kernels.layer_rows),
    )  # fmt: skip
    cases = dict.fromkeys((row["cluster"], row["workload"]) for row in record["serving"])
    for cluster, workload in cases:
        for at, row in enumerate(record["serving"]):
            if (row["cluster"], row["workload"]) == (cluster, workload) and row["ours"]:
                yield claim(
                    kind="serving", name=f"cluster {cluster}, {workload}, {row['scheme']}",
                    path=("record", "serving", at, "ours", "latency_s"), seconds=0.5,
                    compute=_without_data(served_as_then, cluster, workload, row["scheme"]),
                )  # fmt: skip
    for at, (row, logged) in enumerate(zip(record["runs"], llm_pq_kernels.RUNS, strict=True)):
        yield claim(
            kind="runs", name=f"{at}: cluster {row['cluster']}, {row['scheme']}",
            path=("record", "runs", at, "ours_s"), seconds=0.5,
            compute=_without_data(llm_pq_kernels.priced_s, logged),
        )  # fmt: skip


def served_as_then(cluster: int, workload: str, scheme: str) -> Json:
    """Return the seconds of a scheme's plan with the paper's kernels."""
    case = run_all.Case(cluster=cluster, workload=workload)
    plan = llm_pq_kernels.plan_of(case, scheme, today=False)
    return None if plan is None else plan.estimate.latency_s


def flexgen_claims(found: Json) -> Iterator[Claim]:
    """Yield FlexGen's rows: seconds and shares."""
    for at, row in enumerate(found["record"]["rows"]):
        case = run_all.Case(cluster=row["cluster"], workload=row["workload"])
        yield Claim(
            topic="flexgen", kind="rows", name=f"{row['table']}, {row['cluster']}, {row['scheme']}",
            path=("record", "rows", at, "priced"), seconds=0.2,
            compute=_without_data(
                partial(flexgen.priced, is_int8=row["scheme"] == flexgen.INT8), case
            ),
        )  # fmt: skip


# --- vLLM, fleets, planner, forecasts ---


def vllm_claims(found: Json) -> Iterator[Claim]:
    """Yield the real run's figures, ours and LLMServingSim's."""
    for name in found["record"]:
        yield Claim(
            topic="vllm", kind="run", name=name, path=("record", name), seconds=1.5,
            data=("llmservingsim",), compute=partial(vllm_figures, name),
        )  # fmt: skip


@cache
def _vllm_run(folder: Path) -> Json:
    return vllm_run.collect(folder)


def vllm_figures(name: str, data: Path) -> Json:
    """Return a part of the comparison with the real run."""
    return _vllm_run(data / "llmservingsim")[name]


def fleet_claims(found: Json) -> Iterator[Claim]:
    """Yield the fleets of the paper's clusters, and their seconds; searches cut short are left out.

    The search of 64 devices ends with its time limit.
    """
    for at, row in enumerate(found["record"]["clusters"]):
        if row["cluster"].isdigit() and row["fleet"] is not None and row["fleet"]["gap"] == 0:
            path, number = ("record", "clusters", at), int(row["cluster"])
            yield Claim(
                topic="fleets", kind="fleet", name=f"cluster {number}", path=(*path, "fleet"),
                seconds=row["seconds"], compute=_without_data(fleet_of, number),
            )  # fmt: skip
            yield Claim(
                topic="fleets", kind="seconds", name=f"cluster {number}", path=(*path, "seconds"),
                seconds=row["seconds"], compute=_without_data(fleet_seconds, number),
                spread=Spread(factor=WIDENED, processor=found["machine"]),
            )  # fmt: skip


@cache
def _fleet(number: int) -> Json:
    request = run_all.Case(cluster=number).request()
    work = replace(request.workload, batch=fleets.BATCH)
    return fleets.entry(str(number), replace(request, workload=work))


def fleet_of(number: int) -> Json:
    """Return the fleet of a cluster; how many searches it took may differ."""
    found = _fleet(number)["fleet"]
    return {name: found[name] for name in ("requests_per_s", "replicas", "rivals")}


def fleet_seconds(number: int) -> Json:
    """Return the seconds of its search."""
    return _fleet(number)["seconds"]


TENS = 10


def planner_claims(found: Json) -> Iterator[Claim]:
    """Yield ten problems each, solved by trying every plan and by the planner."""
    samples = found["samples"]
    for first in range(0, len(samples), TENS):
        seeds = [sample["seed"] for sample in samples[first : first + TENS]]
        yield Claim(
            topic="planner-claims", kind="problems", name=f"{seeds[0]} to {seeds[-1]}",
            path=("samples",), seconds=25.0, compute=_without_data(brute_force, first, seeds),
        )  # fmt: skip


def brute_force(first: int, seeds: Sequence[int]) -> Json:
    """Return the problems' best plans and the planner's, at their places in the file."""
    from benchmarks import brute_force as trial  # noqa: PLC0415

    found: dict[int, Json] = {}
    for place, seed in enumerate(seeds, start=first):
        with tempfile.TemporaryDirectory() as folder:
            sample = trial.compared(seed, Path(folder), trial.planner_process)
        names = ("seed", "plans", "best_s", "best_adjacent_s", "difference")
        found[place] = {name: sample[name] for name in names}
        for orders in ("planner_auto", "planner_types"):
            answer = sample[orders]
            found[place][orders] = {
                name: answer[name] for name in ("status", "objective_s") if name in answer
            }
    return found


SEARCHES = {
    "OPT-175b, 96 layers, 16 devices of 4 types, five bitwidths, gap 0": "opt-175b x16",
    "Llama-405b, 126 layers, 64 devices, gap 0.1 %": "405b x64",
    "20 thetas one after another, cluster 3": "sweep of 20",
}
"""Rows of the seconds of exact searches, and the cases of the benchmark."""


def planning_claims(found: Json) -> Iterator[Claim]:
    """Yield the seconds of exact searches of large problems."""
    for at, row in enumerate(found["tables"][0]["rows"]):
        if row[0] in SEARCHES:
            yield Claim(
                topic="planning", kind="seconds", name=row[0], path=("tables", 0, "rows", at, 1),
                seconds=row[1], compute=_without_data(planning_s, SEARCHES[row[0]]),
                spread=Spread(factor=WIDENED, processor=found["machine"]),
            )  # fmt: skip


def planning_s(name: str) -> Json:
    """Return the seconds of a search."""
    from benchmarks import exact_planner  # noqa: PLC0415

    case = next(one for one in exact_planner._cases() if one.name == name)
    return exact_planner._plan(case, 0).planning_s


def forecast_claims(found: Json) -> Iterator[Claim]:
    """Yield the errors of fits on unseen shapes of public tables."""
    (number, unseen) = next(
        (at, one) for at, one in enumerate(found["tables"]) if one["title"] == "Unseen shapes"
    )
    for at, row in enumerate(unseen["rows"]):
        yield Claim(
            topic="forecasts-public", kind="unseen shapes", name=row["tables"],
            path=("tables", number, "rows", at), seconds=5.0, spread=ROUNDED,
            data=FORECAST_DATA.get(row["tables"].split()[0], ()),
            compute=partial(unseen_errors, row["tables"]),
        )  # fmt: skip


OTHER_ROUNDING = Spread(relative=1e-3)
"""Of perplexities: processors with other instructions round differently."""


def evaluation_claims(found: Json) -> Iterator[Claim]:
    """Yield the perplexities of the shipped model by bitwidth."""
    for at, (bits, *_) in enumerate(found["tables"][0]["rows"]):
        yield Claim(
            topic="evaluation", kind="perplexity", name=f"{bits} bits",
            path=("tables", 0, "rows", at, 1), seconds=45.0, spread=OTHER_ROUNDING,
            compute=_without_data(perplexity, bits),
        )  # fmt: skip


def perplexity(bits: int) -> Json:
    """Return the perplexity of the shipped model on the held-out text, by ``llmpq-eval``."""
    folder = evidence.ROOT / "models" / "demo"
    program = "import sys; from llmpq.cli.commands.evals import main; sys.exit(main())"
    words = ["--model", folder, "--text", folder / "heldout.txt", "--bits", bits, "--threads", 1]
    return json.loads(_run(["-c", program, *words, "--json"]))["perplexity"]


def _run(words: Sequence[object]) -> str:
    """Run Python with these words as a process of its own; return what it prints."""
    return subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, check=True
    ).stdout


FORECAST_DATA = {"helix": ("helix",), "whole": ("samullm",)}
"""Folders of a group of tables; the others come with the package aiconfigurator-core."""


def unseen_errors(group: str, data: Path) -> Json:
    """Return mean and 95th percentile of the errors of both fits, in percent."""
    from benchmarks import fidelity  # noqa: PLC0415

    pooled: dict[str, list[float]] = {}
    seeds = range(fidelity.FIRST_SEED, fidelity.FIRST_SEED + fidelity.SEEDS)
    for name, _, table in fidelity.tables(None, data):
        if name == group:
            for key, errors in fidelity.held_out(table, seeds).items():
                pooled.setdefault(key, []).extend(errors)
    figures = fidelity.report(pooled)
    return {
        name: [round(100 * figures[key].mean, 2), round(100 * figures[key].p95, 1)]
        for key, name in fidelity.COLUMNS.items()
    }


def _without_data(function: Callable[..., Json], *args: Any) -> Callable[[Path], Json]:
    """Return a function of the folder of data, which this one does not read."""
    return lambda _: function(*args)


TOPICS: Mapping[str, Callable[[Json], Iterator[Claim]]] = {
    "llm-pq": llm_pq,
    "exegpt": exegpt_claims,
    "larry": larry_claims,
    "sal": sal_claims,
    "samullm": samullm_claims,
    "iteration-costs": iteration_claims,
    "multibin": multibin_claims,
    "llm-pq-kernels": kernel_claims,
    "flexgen": flexgen_claims,
    "vllm": vllm_claims,
    "fleets": fleet_claims,
    "planner-claims": planner_claims,
    "planning": planning_claims,
    "forecasts-public": forecast_claims,
    "evaluation": evaluation_claims,
}
"""Result files whose figures can be made again, and their claims."""

MODELS = "needs models, programs of others or a network that are made for it"
EARLIER = "needs an earlier commit"
MEASURED = "is measured by a long run of processes"
NOT_CHECKED: Mapping[str, str] = {
    "activations": EARLIER,
    "agents": MEASURED,
    "applications": MODELS,
    "attacks": MODELS,
    "balancers": MODELS,
    "batch-prefixes": MODELS,
    "batch16": MODELS,
    "batching": MODELS,
    "cases": MODELS,
    "check-claims": "is what this program found",
    "decode": MODELS,
    "demo": "is checked by scripts/demo",
    "device-entry": MODELS,
    "different-devices": MODELS,
    "draft-model": MODELS,
    "efficiency": MODELS,
    "expert-plans": "is planned again by benchmarks/expert_plans.py alone, for minutes",
    "faults": MEASURED,
    "first-answer": MODELS,
    "fit-ablation": EARLIER,
    "fleet-faults": MEASURED,
    "forecasts": MODELS,
    "gpu-kernels": "is checked by scripts/gpu_checks",
    "head": MODELS,
    "host-experts": MODELS,
    "indicators": MEASURED,
    "kv-bits": MODELS,
    "kernels": "has ratios without their samples",
    "lanes": "counts tests",
    "latent": MODELS,
    "loading": "reads cold files, which take thrice as long where others use the disk",
    "long-contexts": MODELS,
    "memory": MODELS,
    "memory-states": MODELS,
    "mtp": MODELS,
    "multibin-measured": MODELS,
    "one-engine": EARLIER,
    "online": MODELS,
    "prompts": MODELS,
    "quantization": MEASURED,
    "ray": MODELS,
    "recurrent-drafts": MODELS,
    "recurrent-layers": MODELS,
    "rooflines": "needs clones of other projects",
    "routers": MODELS,
    "sizes": MODELS,
    "speculation": MODELS,
    "start": MODELS,
    "streaming": MEASURED,
    "stress": MEASURED,
    "throughput": MODELS,
    "transport": MEASURED,
    "two-machines": MODELS,
    "versions": EARLIER,
    "walks": "is checked by tests/scripts/test_walks.py",
}
"""Result files without claims, and why."""
