"""Figure 9: LLM-PQ against adabits, adaptive bitwidths without a thought for time."""

from __future__ import annotations

from collections.abc import Sequence

from reproduce import paper
from reproduce.cases import IMAGES, LONG, SHORT, Case, has_method, keep
from reproduce.output import Record, degradation, number, run, table, times
from reproduce.pictures import draw_bars

METHODS = {"adabits": "adaptive bits only (adabits)", "llmpq": "LLM-PQ"}


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, draw and print."""
    return run("adaptive_only", __doc__, collect, report, argv)


def collect() -> Record:
    """Return one row a cluster, and draw them when there is an adabits to draw."""
    rows = []
    for cluster, tokens_per_s in paper.FIGURE_9.items():
        workload = SHORT if cluster in paper.SHORT_PROMPTS_IN_FIGURE_9 else LONG
        case = Case(cluster=cluster, workload=workload)
        plans = {method: keep(case, method) for method in METHODS}
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
            for method, label in METHODS.items()
        ]
        draw_bars(names, series, IMAGES / "figure-9.png")
    return {"rows": rows}


def report(record: Record) -> str:
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


if __name__ == "__main__":
    raise SystemExit(main())
