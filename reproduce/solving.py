"""Tables 8 and 10: what grouping, the heuristic and the solvers take, and what they find.

Our seconds are those of the processor, of the search and the programs it calls: the machine is
shared, and a wall clock would tell how busy it was.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from statistics import fmean
from typing import NamedTuple

from llmpq.assigner import PlanRequest, make_plan
from llmpq.assigner.request import DEFAULT_GAP
from llmpq.errors import InfeasibleError
from llmpq.spec.model import ModelSpec
from llmpq.spec.plan import Plan
from llmpq.spec.tables import SensitivityTable
from reproduce import paper
from reproduce.cases import Case, has_method
from reproduce.output import Record, number, run, say, table

VARIANTS = {"group 2": ("llmpq", 2), "group 1": ("llmpq", 1), "heuristic": ("heuristic", 1)}
"""Method and layers a group of every row of Table 8."""
TIME_LIMIT_S = 60.0
PROGRAMS = "highs"
"""Solver of integer programs, shown beside the default one."""


class Solved(NamedTuple):
    """A plan, and the processor seconds it took."""

    plan: Plan
    cpu_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Plan with every variant and print."""
    return run("solving", __doc__, collect, report, argv)


def collect() -> Record:
    """Return the rows of both tables."""
    return {"table 8": _grouping_rows(), "table 10": _overhead_rows()}


def report(record: Record) -> str:
    """Return both tables."""
    return f"{_grouping_report(record['table 8'])}\n\n{_overhead_report(record['table 10'])}"


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
    for cluster, published in paper.TABLE_8.items():
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
    for cluster, seconds in paper.TABLE_10.items():
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
                "paper_heuristic": cluster in paper.HEURISTIC_IN_TABLE_10,
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


if __name__ == "__main__":
    raise SystemExit(main())
