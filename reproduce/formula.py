"""The latency formula: what the published one predicts, beside ours and what was measured.

The first table is the authors' own: their solver's log of cluster 3 against the seconds of Table 4.
The second prices our plans with both formulas, and shows what planning by the published one costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmpq.assigner import make_plan
from llmpq.assigner.forecast import evaluate_plan
from llmpq.assigner.request import default_omega
from llmpq.costmodel import build_costs
from llmpq.spec.plan import Formula, Plan
from llmpq.spec.precision import BITS
from reproduce import paper
from reproduce.cases import Case, plan_of
from reproduce.output import Record, number, run, say, table


def main(argv: Sequence[str] | None = None) -> int:
    """Price and print."""
    return run("formula", __doc__, collect, report, argv)


def collect() -> Record:
    """Return both tables' rows."""
    log = [
        {
            "plan": name,
            "paper_formula_s": predicted,
            "steady_formula_s": paper.SOLVER_LOG_STEADY[name],
            "measured_s": measured,
        }
        for name, (predicted, measured) in paper.SOLVER_LOG.items()
    ]
    return {"authors' log of cluster 3": log, "ours": [_ours(number) for number in paper.MODELS]}


def report(record: Record) -> str:
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


if __name__ == "__main__":
    raise SystemExit(main())
