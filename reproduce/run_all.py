"""LLM-PQ (arXiv 2403.01136): every table and figure that can be compared, in one run.

python -m reproduce.run_all
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from llmpq import __version__
from llmpq.assigner import METHODS, PlanRequest, make_plan
from llmpq.assigner.constraints.resolve import Overrides
from llmpq.assigner.forecast import evaluate_plan
from llmpq.assigner.request import DEFAULT_GAP, default_omega
from llmpq.costmodel import build_costs
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec import catalog
from llmpq.spec.cluster import cluster_of_types, load_cluster
from llmpq.spec.model import ModelSpec
from llmpq.spec.plan import Formula, MicroBatching, Plan, read_plan, write_plan
from llmpq.spec.precision import BITS
from llmpq.spec.tables import SensitivityTable
from llmpq.spec.workload import load_workload
from reproduce.output import IMAGES, ROOT, Record, degradation, number, run, say, table, times

# --- What the paper publishes, typed in from its tables ---

# FlexGen's rows are in ``flexgen``.
# Figures 8 and 9 are pictures without numbers; only what the text says of them is kept.


MODELS = {
    1: "facebook/opt-13b",
    2: "facebook/opt-13b",
    3: "facebook/opt-30b",
    4: "facebook/opt-30b",
    5: "facebook/opt-66b",
    6: "facebook/opt-66b",
    7: "bigscience/bloom",
    8: "bigscience/bloom",
    9: "facebook/opt-30b",
    10: "facebook/opt-66b",
    11: "bigscience/bloom",
}
"""Table 3: the model of every cluster."""

SCHEMES = {"pipeedge": "PipeEdge", "uniform": "Uniform", "llmpq": "LLM-PQ"}
"""The method here for every scheme there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperServing:
    """One row of Tables 4, 5 and 7; all ``None`` where the paper reports that memory ran out."""

    perplexity: float | None
    latency_s: float | None


def _rows(
    numbers: dict[int, tuple[tuple[float, float] | None, ...]],
) -> dict[int, dict[str, PaperServing]]:
    found = {}
    for cluster, rows in numbers.items():
        found[cluster] = {
            method: PaperServing(
                perplexity=None if row is None else row[0],
                latency_s=None if row is None else row[1],
            )
            for method, row in zip(SCHEMES, rows, strict=True)
        }
    return found


# Perplexity and seconds of PipeEdge, Uniform and LLM-PQ, in that order.
TABLE_4 = _rows(
    {
        1: ((11.78, 233.77), (11.23, 57.59), (11.23, 57.59)),
        2: ((11.38, 30.84), (11.38, 30.84), (11.23, 20.63)),
        3: ((10.70, 146.40), (10.78, 948.90), (10.70, 80.60)),
        4: ((10.78, 449.55), None, (10.70, 214.19)),
        5: ((10.50, 750.84), None, (10.40, 320.84)),
        6: ((10.34, 115.03), (10.50, 431.92), (10.31, 68.67)),
        7: ((10.97, 729.91), None, (10.90, 427.76)),
        8: ((10.97, 848.98), None, (10.90, 294.68)),
    }
)
TABLE_5 = _rows(
    {
        9: ((10.78, 1045.93), (10.78, 1045.93), (10.75, 407.75)),
        10: ((10.33, 182.47), (10.50, 477.52), (10.33, 178.11)),
        11: ((10.90, 49.12), (10.97, 895.45), (10.90, 45.45)),
    }
)
TABLE_7 = _rows(
    {
        1: ((11.23, 84.80), (11.23, 84.80), (11.23, 47.63)),
        4: ((10.70, 366.54), (10.80, 281.83), (10.70, 262.34)),
        6: ((10.33, 132.34), (10.33, 298.99), (10.30, 75.98)),
    }
)

TABLE_8 = {
    3: {"group 2": (39.70, 1.07), "group 1": (39.70, 3.29), "heuristic": (35.17, 5.36)},
    6: {"group 2": (39.56, 2.70), "group 1": (44.93, 19.14), "heuristic": (28.45, 7.70)},
    4: {"group 2": (14.72, 12.29), "group 1": (13.93, 204.59), "heuristic": (14.94, 1.99)},
    10: {"group 2": (16.64, 59.27), "group 1": (17.57, 127.28), "heuristic": (17.97, 2.11)},
}
"""Tokens per second and seconds of solving, under a limit of 60 s a program."""

TABLE_10 = {
    1: 0.2977,
    2: 0.2977,
    3: 2.78127,
    4: 2.28628,
    5: 9.9239153,
    6: 115.981,
    7: 44.3031,
    8: 19.31674,
    9: 1.15838,
    10: 2.45544,
    11: 3.4,
}
"""Seconds of solving with Gurobi (Table 9: by heuristic on clusters 4, 5, 10 and 11)."""
HEURISTIC_IN_TABLE_10 = (4, 5, 10, 11)

FIGURE_8 = {9: (1.0, "a"), 5: (50.0, "b")}
"""Clusters swept, with the theta of Table 9 (the picture's "10x") and the panel."""

FIGURE_9 = {3: 39.70, 5: 9.97, 6: 46.60, 9: 7.85, 4: 24.40}
"""Clusters compared with adabits; LLM-PQ's tokens per second, from Tables 4, 5 and 7."""
SHORT_PROMPTS_IN_FIGURE_9 = (4,)

SOLVER_LOG = {"LLM-PQ": (58.8, 80.6), "PipeEdge": (104.6, 146.4), "Uniform": (919.0, 948.9)}
"""Cluster 3: seconds that the authors' solver log predicts, and seconds they measured."""
SOLVER_LOG_STEADY = {"LLM-PQ": 73.8, "PipeEdge": 134.7, "Uniform": 947.0}
"""The same plans and stage times by ``(n - 1) max(mu T_max, sum T)``."""


# --- Its cases as planning requests, and our plans of them ---

# A plan is made once for each process. A kept file is touched only when its plan
# changes: a rerun that merely took another number of seconds leaves it alone.


STRATEGIES = ROOT / "strategies"
LONG, SHORT = "s512-n100-b32", "s128-n200-b32"
"""Workloads: 32 prompts of 512 tokens and 100 new ones each; of 128 tokens and 200 (Sec. 6.6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One of the paper's clusters with its model, under one of its workloads."""

    cluster: int
    workload: str = LONG

    @property
    def cluster_file(self) -> str:
        """Path of the cluster file, from the repository's root."""
        return f"inputs/clusters/paper-{self.cluster:02d}.json"

    @property
    def workload_file(self) -> str:
        """Path of the workload file, from the repository's root."""
        return f"inputs/workloads/{self.workload}.json"

    @property
    def model_name(self) -> str:
        """Catalogue name of the model."""
        return MODELS[self.cluster]

    def request(self, **options: Any) -> PlanRequest:
        """Return the request for a plan, in float16 and with the default sensitivity."""
        return PlanRequest(
            model=catalog.model(self.model_name),
            cluster=load_cluster(ROOT / self.cluster_file),
            workload=load_workload(ROOT / self.workload_file),
            dtype="float16",
            kv_bits=16,
            # The paper's numbers rest on the catalogue's rooflines, whatever tables are installed.
            latency="roofline",
            **options,
        )

    def command(self, method: str) -> str:
        """Return the command that makes the plan which is kept."""
        return (
            f"llmpq-algo --model {self.model_name} --dtype float16 --cluster {self.cluster_file} "
            f"--workload {self.workload_file} --method {method}"
        )

    def strategy(self, method: str) -> Path:
        """Return where that plan is kept."""
        model = self.model_name.rpartition("/")[2]
        return STRATEGIES / f"{model}__paper-{self.cluster:02d}__{self.workload}__{method}.json"


@cache
def plan_of(case: Case, method: str) -> Plan | None:
    """Return a case's plan by the defaults of a method, ``None`` when there is none.

    A method that is not in the registry has none either; see ``has_method``.
    """
    if not has_method(method):
        return None
    say(f"cluster {case.cluster}, {case.workload}: {method}")
    try:
        return make_plan(case.request(), method, command=case.command(method))
    except InfeasibleError:
        return None


def has_method(method: str) -> bool:
    """Tell whether the planner knows a method."""
    return method in METHODS


def keep(case: Case, method: str) -> Plan | None:
    """Return a case's plan, written to its file if that holds another one or none."""
    plan = plan_of(case, method)
    path = case.strategy(method)
    if plan is None:
        path.unlink(missing_ok=True)
    elif not _holds(path, plan):
        write_plan(path, plan)
    return plan


def _holds(path: Path, plan: Plan) -> bool:
    """Tell whether a file holds that plan, whatever seconds its search took."""
    if not path.exists():
        return False
    try:
        kept = read_plan(path)
    except SpecError:
        return False
    return replace(kept, search=replace(kept.search, planning_s=plan.search.planning_s)) == plan


# --- Tables 4, 5 and 7: latency and throughput of LLM-PQ and its rivals ---


SERVING_TABLES = {
    "4": ("Serving in heterogeneous clusters", TABLE_4, LONG),
    "5": ("Serving in homogeneous clusters", TABLE_5, LONG),
    "7": ("Serving with shorter prompts", TABLE_7, SHORT),
}
BUDGET_SLACK = 1e-9
"""Keeps rounding from forbidding the rival's own bitwidths."""
SERVING_HEAD = (
    "cluster",
    "model",
    "scheme",
    "PPL, paper",
    "latency s, paper",
    "tokens/s, paper",
    "gain, paper",
    "omega, ours",
    "latency s, ours",
    "tokens/s, ours",
    "gain, ours",
    "latency, paper / ours",
)
RIVAL, RIVAL_AT_BEST = "PipeEdge", "PipeEdge, best micro-batches"
OURS, OURS_AT_EQUAL_QUALITY = "LLM-PQ", "LLM-PQ, no worse than PipeEdge"
OURS_AT_BEST = "LLM-PQ, no worse than PipeEdge, best micro-batches"


def collect_serving() -> Record:
    """Return the rows of all three tables."""
    return {f"table {name}": _serving_rows(name) for name in SERVING_TABLES}


def report_serving(record: Record) -> str:
    """Return all three tables and the mean gains."""
    parts = []
    for name, (title, _, workload) in SERVING_TABLES.items():
        rows = record[f"table {name}"]
        lines = [_serving_line(row) for row in rows]
        parts.append(f"## Table {name}: {title} ({workload})\n\n{table(SERVING_HEAD, lines)}")
        parts.append(_mean_gains(rows))
    parts.append(
        "gain: PipeEdge's latency over the scheme's, with PipeEdge as the paper runs it: the batch "
        "over the number of devices as the micro-batch of both phases. OOM: no plan fits. omega: "
        "predicted degradation, 0 is unquantized and 1 every layer at 4 bits; no perplexity."
    )
    return "\n\n".join(parts)


def _serving_rows(name: str) -> list[Record]:
    _, published, workload = SERVING_TABLES[name]
    rows = []
    for cluster, schemes in published.items():
        case = Case(cluster=cluster, workload=workload)
        plans = _plans(case)
        theirs = {SCHEMES[method]: serving for method, serving in schemes.items()}
        tokens = case.request().workload.batch * case.request().workload.new_tokens
        for scheme, plan in plans.items():
            served = theirs.get(scheme)
            paper_s = None if served is None else served.latency_s
            ours_s = _latency_s(plan)
            rows.append(
                {
                    "cluster": cluster,
                    "model": case.model_name.rpartition("/")[2],
                    "scheme": scheme,
                    "in_paper": served is not None,
                    "paper_perplexity": None if served is None else served.perplexity,
                    "paper_latency_s": paper_s,
                    "paper_tokens_per_s": _over(tokens, paper_s),
                    "paper_gain": _over(theirs[RIVAL].latency_s, paper_s),
                    "omega": None if plan is None else plan.estimate.quality,
                    "latency_s": ours_s,
                    "tokens_per_s": _over(tokens, ours_s),
                    "gain": _over(_latency_s(plans[RIVAL]), ours_s),
                    "gain_over_best": _over(_latency_s(plans[RIVAL_AT_BEST]), ours_s),
                }
            )
    return rows


def _plans(case: Case) -> dict[str, Plan | None]:
    """Return the plans of one case by scheme, and keep those that are a method's own."""
    rival = _pipeedge_of_the_paper(case)
    best = keep(case, "pipeedge")
    uniform = keep(case, "uniform")
    ours = keep(case, "llmpq")
    return {
        RIVAL: rival,
        RIVAL_AT_BEST: best,
        "Uniform": uniform,
        OURS: ours,
        OURS_AT_EQUAL_QUALITY: _no_worse_than(rival, case),
        OURS_AT_BEST: _no_worse_than(best, case),
    }


def _no_worse_than(rival: Plan | None, case: Case) -> Plan | None:
    """Return our plan with no larger omega than a rival's."""
    if rival is None:
        return None
    budget = rival.estimate.quality * (1 + BUDGET_SLACK)
    say(f"cluster {case.cluster}, {case.workload}: llmpq, omega at most {budget:.3g}")
    return make_plan(case.request(quality_budget=budget))


def _pipeedge_of_the_paper(case: Case) -> Plan | None:
    """Return PipeEdge's plan with ``B / N`` sequences a micro-batch in both phases (Sec. 6.1)."""
    request = case.request()
    size = math.ceil(request.workload.batch / len(request.cluster.devices))
    sizes = Overrides(micro_batching=MicroBatching(prefill=size, decode=size))
    say(f"cluster {case.cluster}, {case.workload}: pipeedge at {size}")
    try:
        return make_plan(replace(request, overrides=sizes), "pipeedge")
    except InfeasibleError:
        return None


def _latency_s(plan: Plan | None) -> float | None:
    return None if plan is None else plan.estimate.latency_s


def _serving_line(row: Record) -> list[str]:
    lost = "OOM" if row["in_paper"] else "-"
    return [
        str(row["cluster"]),
        row["model"],
        row["scheme"],
        number(row["paper_perplexity"], missing=lost),
        number(row["paper_latency_s"], missing=lost),
        number(row["paper_tokens_per_s"]),
        times(row["paper_gain"]),
        degradation(row["omega"]),
        number(row["latency_s"], missing="OOM"),
        number(row["tokens_per_s"]),
        times(row["gain"]),
        times(_over(row["paper_latency_s"], row["latency_s"])),
    ]


def _mean_gains(rows: Sequence[Record]) -> str:
    means = []
    for label, scheme, field in (
        ("paper", OURS, "paper_gain"),
        ("ours", OURS, "gain"),
        ("ours, no worse than PipeEdge", OURS_AT_EQUAL_QUALITY, "gain"),
        ("ours over PipeEdge with its best micro-batches", OURS, "gain_over_best"),
        ("the same, no worse than it", OURS_AT_BEST, "gain_over_best"),
    ):
        known = [row[field] for row in rows if row["scheme"] == scheme and row[field] is not None]
        means.append(f"{label} {times(fmean(known) if known else None)}")
    return f"Mean gain of LLM-PQ over PipeEdge: {'; '.join(means)}."


def _over(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


# --- Tables 8 and 10: what grouping, the heuristic and the solvers take and find ---

# Our seconds are those of the processor, of the search and the programs it calls: the machine is
# shared, and a wall clock would tell how busy it was.


VARIANTS = {"group 2": ("llmpq", 2), "group 1": ("llmpq", 1), "heuristic": ("heuristic", 1)}
"""Method and layers a group of every row of Table 8."""
TIME_LIMIT_S = 60.0
PROGRAMS = "highs"
"""Solver of integer programs, shown beside the default one."""


class Solved(NamedTuple):
    """A plan, and the processor seconds it took."""

    plan: Plan
    cpu_s: float


def collect_solving() -> Record:
    """Return the rows of both tables."""
    return {
        "table 8": _grouping_rows(),
        "table 10": _overhead_rows(),
        "three nodes": {
            f"{method} by {solver}": _outcome(three_nodes(solver, method))
            for solver, method in _planners()
        },
    }


THREE_NODES = {"P100-12G": 2, "V100-32G": 2, "A100-40G": 2}
THREE_NODES_S = 31.0
"""Seconds of the heuristic for OPT-66B on them (A.2.2)."""


def three_nodes(solver: str, method: str) -> Solved | None:
    """Return the plan of OPT-66B for three nodes of two GPUs, layers different."""
    number = next(key for key, name in MODELS.items() if name.endswith("opt-66b"))
    request = Case(cluster=number).request(
        solver=solver, time_limit_s=TIME_LIMIT_S, sensitivity=_uneven(catalog.model(MODELS[number]))
    )
    return _try(replace(request, cluster=cluster_of_types(THREE_NODES)), method)


def report_solving(record: Record) -> str:
    """Return both tables."""
    seconds = ", ".join(
        f"{number(one['solving_s'])} ({name})" for name, one in record["three nodes"].items()
    )
    return "\n\n".join([
        _grouping_report(record["table 8"]),
        _overhead_report(record["table 10"]),
        f"OPT-66B on two P100, V100 and A100 each: the paper's heuristic {THREE_NODES_S:.0f} s; "
        f"ours, CPU s: {seconds}.",
    ])  # fmt: skip


def _grouping_report(rows: Sequence[Record]) -> str:
    head = ["cluster", "model", "method", "tokens/s, paper", "solving s, paper"]
    head += ["tokens/s, ours", "objective s, ours", "solving CPU s, ours", "proven gap"]
    lines = [
        [
            str(row["cluster"]),
            row["model"],
            row["variant"],
            number(row["paper_tokens_per_s"]),
            number(row["paper_solving_s"]),
            number(row["ours"]["tokens_per_s"], missing=row["missing"]),
            number(row["ours"]["objective_s"], 3),
            number(row["ours"]["solving_s"]),
            _share(row["ours"]["gap"]),
        ]
        for row in rows
    ]
    title = f"Table 8: grouping and heuristic, limit {TIME_LIMIT_S:.0f} s"
    return f"## {title}\n\n{table(head, lines)}"


def _overhead_report(rows: Sequence[Record]) -> str:
    columns = list(rows[0]["ours"])
    head = ["cluster", "model", "paper s", *(f"{name}, CPU s" for name in columns)]
    lines = [
        [
            str(row["cluster"]),
            row["model"],
            number(row["paper_s"]) + (" (heuristic)" if row["paper_heuristic"] else ""),
            *(_seconds(row["ours"][name]) for name in columns),
        ]
        for row in rows
    ]
    seconds = [
        [row["paper_s"] for row in rows],
        *([row["ours"][name]["solving_s"] for row in rows] for name in columns),
    ]
    for label, summary in (("mean", fmean), ("slowest", max)):
        known = [[value for value in column if value is not None] for column in seconds]
        lines.append([label, "", *(number(summary(column)) if column else "-" for column in known)])
    note = f"Limit {TIME_LIMIT_S:.0f} s; a gap is given where it was not proven below 0.1 %."
    return f"## Table 10: solving overhead\n\n{table(head, lines)}\n\n{note}"


def _seconds(outcome: Record) -> str:
    gap = outcome["gap"]
    return number(outcome["solving_s"]) + (
        f" (gap {_share(gap)})" if gap is not None and gap > DEFAULT_GAP + 1e-9 else ""
    )


def _share(gap: float | None) -> str:
    return "-" if gap is None else f"{100 * gap:.2f} %"


def _outcome(solved: Solved | None) -> Record:
    if solved is None:
        return dict.fromkeys(("tokens_per_s", "objective_s", "solving_s", "gap"))
    plan = solved.plan
    return {
        "tokens_per_s": plan.throughput_tokens_per_s,
        "objective_s": plan.estimate.objective_s,
        "solving_s": solved.cpu_s,
        "gap": plan.search.gap,
    }


def _grouping_rows() -> list[Record]:
    rows = []
    for cluster, published in TABLE_8.items():
        case = Case(cluster=cluster)
        # One price of degradation for all variants: the default depends on the grouping a little.
        theta_s = _solve(case.request(), "llmpq").plan.search.theta_s
        for variant, (tokens_per_s, solving_s) in published.items():
            method, group = VARIANTS[variant]
            say(f"table 8: cluster {cluster}, {variant}")
            request = case.request(theta_s=theta_s, layer_group=group, time_limit_s=TIME_LIMIT_S)
            solved = _try(request, method) if has_method(method) else None
            rows.append(
                {
                    "cluster": cluster,
                    "model": case.model_name.rpartition("/")[2],
                    "variant": variant,
                    "paper_tokens_per_s": tokens_per_s,
                    "paper_solving_s": solving_s,
                    "missing": "no plan" if has_method(method) else "no such method",
                    "ours": _outcome(solved),
                }
            )
    return rows


def _overhead_rows() -> list[Record]:
    rows = []
    for cluster, seconds in TABLE_10.items():
        case = Case(cluster=cluster)
        say(f"table 10: cluster {cluster}")
        outcomes = {}
        uneven = _uneven(case.request().model)
        for label, sensitivity in (("equal layers", None), ("different layers", uneven)):
            for solver, method in _planners():
                request = case.request(
                    sensitivity=sensitivity, solver=solver, time_limit_s=TIME_LIMIT_S
                )
                solved = _try(request, method)
                by = solver if solved is None else solved.plan.search.solver
                outcomes[f"{method}{f' by {by}' if by else ''}, {label}"] = _outcome(solved)
        rows.append(
            {
                "cluster": cluster,
                "model": case.model_name.rpartition("/")[2],
                "paper_s": seconds,
                "paper_heuristic": cluster in HEURISTIC_IN_TABLE_10,
                "ours": outcomes,
            }
        )
    return rows


def _planners() -> list[tuple[str, str]]:
    """Return the solver and method of every column of Table 10: the default first."""
    (default,) = (field.default for field in fields(PlanRequest) if field.name == "solver")
    solvers = dict.fromkeys((default, PROGRAMS))
    return [*((name, "llmpq") for name in solvers), (PROGRAMS, "heuristic")]


def _uneven(model: ModelSpec) -> SensitivityTable:
    """Return a made-up table in which later layers weigh up to five times the first.

    With the default one all layers are alike, which makes the program far smaller than the
    paper's; solving times are comparable only when layers differ.
    """
    layers = range(model.num_layers)
    weights = [0.4 + 1.6 * layer / model.num_layers for layer in layers]
    return SensitivityTable(
        model=model.name,
        method="made up: different layers",
        omega=tuple(
            (bits, tuple((15 / (2**bits - 1)) ** 2 * weight for weight in weights))
            for bits in (8, 4, 3)
        ),
    )


def _try(request: PlanRequest, method: str) -> Solved | None:
    try:
        return _solve(request, method)
    except InfeasibleError:
        return None


@cache
def _solve(request: PlanRequest, method: str) -> Solved:
    before = sum(os.times()[:4])
    plan = make_plan(request, method)
    return Solved(plan, sum(os.times()[:4]) - before)


# --- Figure 8: throughput and quality as the price of degradation grows, clusters 9 and 5 ---


MULTIPLES = tuple(float(f"{10 ** (tenth / 10):.3g}") for tenth in range(-15, 16))
"""Prices swept, as shares of the default price."""
PAPERS = {0.1: "1x", 1.0: "10x", 10.0: "100x"}
"""The three prices of the paper's picture: the one it plans with is its "10x"."""


def collect_sweeps() -> Record:
    """Return one sweep a cluster, and draw them."""
    record = {f"cluster {cluster}": _sweep(cluster) for cluster in FIGURE_8}
    sweeps = [(f"{name}, {_model(name)}", points) for name, points in record.items()]
    from reproduce.pictures import draw_sweeps  # noqa: PLC0415  matplotlib is extra

    draw_sweeps(sweeps, PAPERS, IMAGES / "figure-8.png")
    return record


def report_sweeps(record: Record) -> str:
    """Return the paper's three prices of both sweeps as a table."""
    head = ["cluster", "price, as in the paper", "theta s", "tokens/s", "omega"]
    lines = [
        [
            name.removeprefix("cluster "),
            PAPERS[point["multiple"]],
            number(point["theta_s"], 1),
            number(point["tokens_per_s"]),
            degradation(point["omega"]),
        ]
        for name, points in record.items()
        for point in points
        if point["multiple"] in PAPERS
    ]
    return (
        f"## Figure 8: the price of degradation\n\n{table(head, lines)}\n\n"
        f"{len(MULTIPLES)} prices a cluster in docs/images/figure-8.png. The paper's picture has "
        "no numbers; its text says that a larger theta gives less throughput and more quality."
    )


def _model(name: str) -> str:
    return MODELS[int(name.removeprefix("cluster "))].rpartition("/")[2]


def _sweep(cluster: int) -> list[Record]:
    case = Case(cluster=cluster)
    chosen = plan_of(case, "llmpq")
    assert chosen is not None
    points = []
    for multiple in MULTIPLES:
        say(f"figure 8: cluster {cluster}, {multiple} of the default price")
        plan = make_plan(case.request(theta_s=multiple * chosen.search.theta_s))
        points.append(
            {
                "multiple": multiple,
                "theta_s": plan.search.theta_s,
                "tokens_per_s": plan.throughput_tokens_per_s,
                "omega": plan.estimate.quality,
            }
        )
    return points


# --- Figure 9: against adabits, adaptive bitwidths without a thought for time ---


ADAPTIVE = {"adabits": "adaptive bits only (adabits)", "llmpq": "LLM-PQ"}


def collect_adaptive() -> Record:
    """Return one row a cluster, and draw them when there is an adabits to draw."""
    rows = []
    for cluster, tokens_per_s in FIGURE_9.items():
        workload = SHORT if cluster in SHORT_PROMPTS_IN_FIGURE_9 else LONG
        case = Case(cluster=cluster, workload=workload)
        plans = {method: keep(case, method) for method in ADAPTIVE}
        rows.append(
            {
                "cluster": cluster,
                "model": case.model_name.rpartition("/")[2],
                "workload": workload,
                "paper_llmpq_tokens_per_s": tokens_per_s,
                **{
                    f"{method}_tokens_per_s": plan and plan.throughput_tokens_per_s
                    for method, plan in plans.items()
                },
                **{
                    f"{method}_omega": plan and plan.estimate.quality
                    for method, plan in plans.items()
                },
            }
        )
    if has_method("adabits"):
        names = [f"cluster {row['cluster']}\n{row['model']}\n{row['workload']}" for row in rows]
        series = [
            (label, [row[f"{method}_tokens_per_s"] or 0.0 for row in rows])
            for method, label in ADAPTIVE.items()
        ]
        from reproduce.pictures import draw_bars  # noqa: PLC0415  matplotlib is extra

        draw_bars(names, series, IMAGES / "figure-9.png")
    return {"rows": rows}


def report_adaptive(record: Record) -> str:
    """Return the comparison as a table."""
    head = ["cluster", "model", "workload", "LLM-PQ tokens/s, paper", "adabits tokens/s"]
    head += ["LLM-PQ tokens/s", "gain", "adabits omega", "LLM-PQ omega"]
    lines = []
    for row in record["rows"]:
        slow, fast = row["adabits_tokens_per_s"], row["llmpq_tokens_per_s"]
        lines.append(
            [
                str(row["cluster"]),
                row["model"],
                row["workload"],
                number(row["paper_llmpq_tokens_per_s"]),
                number(slow),
                number(fast),
                times(fast / slow if slow and fast else None),
                degradation(row["adabits_omega"]),
                degradation(row["llmpq_omega"]),
            ]
        )
    return (
        f"## Figure 9: against adaptive quantization alone\n\n{table(head, lines)}\n\n"
        "The paper's picture has no numbers; its text says that LLM-PQ is faster in every case."
    )


# --- The latency formula: what the published one predicts, ours, and what was measured ---

# The first table is the authors' own: their solver's log of cluster 3, and the seconds of Table 4.
# The second prices our plans with both formulas; it shows what planning by the published one costs.


def collect_formula() -> Record:
    """Return both tables' rows."""
    log = [
        {
            "plan": name,
            "paper_formula_s": predicted,
            "steady_formula_s": SOLVER_LOG_STEADY[name],
            "measured_s": measured,
        }
        for name, (predicted, measured) in SOLVER_LOG.items()
    ]
    return {"authors' log of cluster 3": log, "ours": [_ours(number) for number in MODELS]}


def report_formula(record: Record) -> str:
    """Return both tables."""
    head = ["plan", "published formula s", "steady formula s", "measured s"]
    lines = [
        [
            row["plan"],
            number(row["paper_formula_s"], 1),
            number(row["steady_formula_s"], 1),
            number(row["measured_s"], 1),
        ]
        for row in record["authors' log of cluster 3"]
    ]
    parts = [f"## The authors' log of cluster 3\n\n{table(head, lines)}"]
    head = ["cluster", "our plan, published s", "our plan, steady s"]
    head += ["plan by the published formula, steady s", "objective lost"]
    lines = [
        [
            str(row["cluster"]),
            number(row["by_steady"]["paper_s"]),
            number(row["by_steady"]["steady_s"]),
            number(row["by_paper"]["steady_s"]),
            f"{100 * row['objective_lost']:.1f} %",
        ]
        for row in record["ours"]
    ]
    parts.append(f"## Our plans under both formulas\n\n{table(head, lines)}")
    return "\n\n".join(parts)


def _ours(cluster: int) -> Record:
    case = Case(cluster=cluster)
    ours = plan_of(case, "llmpq")
    assert ours is not None
    say(f"cluster {cluster}: planned by the published formula")
    theirs = make_plan(case.request(formula="paper", theta_s=ours.search.theta_s))
    by_steady, by_paper = _prices(ours), _prices(theirs)
    return {
        "cluster": cluster,
        "by_steady": by_steady,
        "by_paper": by_paper,
        "objective_lost": by_paper["objective_s"] / by_steady["objective_s"] - 1,
    }


def _prices(plan: Plan) -> Record:
    costs = build_costs(
        Case(cluster=int(plan.cluster.name.rpartition("-")[2])).request().model,
        plan.cluster,
        dtype=plan.dtype,
        kv_bits=plan.kv_bits,
        latency="roofline",
    )
    omega = default_omega(costs.model, BITS)
    formulas: tuple[Formula, ...] = ("paper", "steady")
    estimates = {
        formula: evaluate_plan(
            replace(plan, search=replace(plan.search, formula=formula)), costs, omega
        )[0]
        for formula in formulas
    }
    return {
        "paper_s": estimates["paper"].latency_s,
        "steady_s": estimates["steady"].latency_s,
        "objective_s": estimates["steady"].objective_s,
    }


# --- All of them ---

PARTS: dict[str, tuple[Callable[[], Record], Callable[[Record], str]]] = {
    "serving": (collect_serving, report_serving),
    "solving": (collect_solving, report_solving),
    "theta_sweep": (collect_sweeps, report_sweeps),
    "adaptive_only": (collect_adaptive, report_adaptive),
    "formula": (collect_formula, report_formula),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts; print one report or one JSON object."""

    def whole(record: Record) -> str:
        versions = ", ".join(f"{name} {number}" for name, number in record["made with"].items())
        return f"{report(record)}\n\nMade with {versions}."

    return run("run_all", __doc__, collect, whole, argv)


def collect() -> Record:
    """Return the record of every part, and what it was made with."""
    made_with = {
        "llmpq": __version__,
        "python": platform.python_version(),
        "highspy": version("highspy"),
        "machine": platform.machine(),
        "cores": str(os.cpu_count()),
    }
    return {"made with": made_with} | {name: part[0]() for name, part in PARTS.items()}


def report(record: Record) -> str:
    """Return all reports, one after the other."""
    return "\n\n".join(part[1](record[name]) for name, part in PARTS.items())


if __name__ == "__main__":
    raise SystemExit(main())
