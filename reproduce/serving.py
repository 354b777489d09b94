"""Tables 4, 5 and 7: latency and throughput of LLM-PQ and its rivals, ours beside the paper's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from llmpq.assigner import make_plan
from llmpq.assigner.constraints.resolve import Overrides
from llmpq.errors import InfeasibleError
from llmpq.spec.plan import MicroBatching, Plan
from reproduce import paper
from reproduce.cases import LONG, SHORT, Case, keep
from reproduce.output import Record, degradation, number, run, say, table, times

TABLES = {
    "4": ("Serving in heterogeneous clusters", paper.TABLE_4, LONG),
    "5": ("Serving in homogeneous clusters", paper.TABLE_5, LONG),
    "7": ("Serving with shorter prompts", paper.TABLE_7, SHORT),
}
BUDGET_SLACK = 1e-9
"""Keeps rounding from forbidding the rival's own bitwidths."""
HEAD = (
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


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, print and keep the strategies."""
    return run("serving", __doc__, collect, report, argv)


def collect() -> Record:
    """Return the rows of all three tables."""
    return {f"table {name}": _rows(name) for name in TABLES}


def report(record: Record) -> str:
    """Return all three tables and the mean gains."""
    parts = []
    for name, (title, _, workload) in TABLES.items():
        rows = record[f"table {name}"]
        lines = [_line(row) for row in rows]
        parts.append(f"## Table {name}: {title} ({workload})\n\n{table(HEAD, lines)}")
        parts.append(_mean_gains(rows))
    parts.append(
        "gain: PipeEdge's latency over the scheme's, with PipeEdge as the paper runs it: the batch "
        "over the number of devices as the micro-batch of both phases. OOM: no plan fits. omega: "
        "predicted degradation, 0 is unquantized and 1 every layer at 4 bits; no perplexity."
    )
    return "\n\n".join(parts)


def _rows(name: str) -> list[Record]:
    _, published, workload = TABLES[name]
    rows = []
    for cluster, schemes in published.items():
        case = Case(cluster=cluster, workload=workload)
        plans = _plans(case)
        theirs = {paper.SCHEMES[method]: serving for method, serving in schemes.items()}
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


def _line(row: Record) -> list[str]:
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


if __name__ == "__main__":
    raise SystemExit(main())
