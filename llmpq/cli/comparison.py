"""The outcomes of all methods as one table, for ``llmpq-algo --method all``."""

from __future__ import annotations

from collections.abc import Sequence

from llmpq.assigner.explain.compare import Outcome
from llmpq.cli.report import compact_bits
from llmpq.spec.plan import Plan
from llmpq.units import format_seconds

_HEAD = (
    "method",
    "objective",
    "latency",
    "tokens/s",
    "quality lost",
    "bits",
    "stages",
    "micro-batches",
    "planned in",
)


def comparison_table(outcomes: Sequence[Outcome]) -> str:
    """Return one row a method, the cheapest first; methods without a plan follow with the reason.

    The objective is also told relative to the cheapest.
    """
    plans = sorted(
        ((outcome.method, outcome.plan) for outcome in outcomes if outcome.plan is not None),
        key=lambda item: item[1].estimate.objective_s,
    )
    lines = []
    if plans:
        least_s = plans[0][1].estimate.objective_s
        rows = [_HEAD, *(_row(method, plan, least_s) for method, plan in plans)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        lines.append("")
    lines += [
        f"{outcome.method}: no plan: {outcome.error}"
        for outcome in outcomes
        if outcome.plan is None
    ]
    return "\n".join(lines).rstrip()


def _row(method: str, plan: Plan, least_s: float) -> tuple[str, ...]:
    estimate, micro = plan.estimate, plan.micro_batching
    more = estimate.objective_s / least_s - 1 if least_s > 0 else 0.0
    return (
        method,
        f"{estimate.objective_s:.4g} s (+{more:.1%})",
        f"{estimate.latency_s:.4g} s",
        f"{plan.throughput_tokens_per_s:.4g}",
        f"{estimate.quality:.3g}",
        compact_bits(plan.bits),
        f"{sum(stage.num_layers > 0 for stage in plan.stages)} of {len(plan.cluster.devices)}",
        f"{micro.prefill}, {micro.decode}",
        format_seconds(plan.search.planning_s),
    )
