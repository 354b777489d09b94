"""Figure 8: throughput against quality as the price of degradation grows, on clusters 9 and 5."""

from __future__ import annotations

from collections.abc import Sequence

from llmpq.assigner import make_plan
from reproduce import paper
from reproduce.cases import IMAGES, Case, plan_of
from reproduce.output import Record, degradation, number, run, say, table
from reproduce.pictures import draw_sweeps

MULTIPLES = tuple(float(f"{10 ** (tenth / 10):.3g}") for tenth in range(-15, 16))
"""Prices swept, as shares of the default price."""
PAPERS = {0.1: "1x", 1.0: "10x", 10.0: "100x"}
"""The three prices of the paper's picture: the one it plans with is its "10x"."""


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, draw and print."""
    return run("theta_sweep", __doc__, collect, report, argv)


def collect() -> Record:
    """Return one sweep a cluster, and draw them."""
    record = {f"cluster {cluster}": _sweep(cluster) for cluster in paper.FIGURE_8}
    sweeps = [(f"{name}, {_model(name)}", points) for name, points in record.items()]
    draw_sweeps(sweeps, PAPERS, IMAGES / "figure-8.png")
    return record


def report(record: Record) -> str:
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
    return paper.MODELS[int(name.removeprefix("cluster "))].rpartition("/")[2]


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


if __name__ == "__main__":
    raise SystemExit(main())
