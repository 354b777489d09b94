"""What benchmarks/policies.py measured so far: tables of forecasts and gains, and a picture.

    python benchmarks/policies_report.py FOLDER [--picture FILE.png]

Each run is simulated with the table that every calibrating run has corrected; errors are against
the median of the turns. Gains are over static batches of the same turn.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

from policies_bench import (
    BIN_RUNS,
    POLICIES,
    TASKS,
    Bench,
    bound_runs,
    figures,
    words,
)
from policies_table import recalibrate

from llmpq.cli.plots import INK, new_figure

HEAD = (
    "schedule", "runs", "tokens/s", "spread", "simulated", "error",
    "mean latency, s", "simulated", "error", "99 % in service, s", "bound, s", "gain in each turn",
)  # fmt: skip
ALL = (*POLICIES, *bound_runs(), *BIN_RUNS)


def main() -> int:
    """Print the tables, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    folder = options.folder.absolute()
    recalibrate(folder)
    rows = {
        (task, name): row
        for task in TASKS
        for bench in (Bench(folder, task),)
        for name in ALL
        if (row := row_of(bench, name)) is not None
    }
    tell(rows)
    if options.picture is not None:
        draw(options.picture, rows)
    return 0


def tell(rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Print a table of every task, and the errors of all."""
    for task in TASKS:
        print(f"\n| {task}: run | {' | '.join(HEAD)} |\n|" + " --- |" * (1 + len(HEAD)))
        for (own, name), row in rows.items():
            if own == task:
                print(f"| {name} | {row['text']} |")
    kinds = {
        "policies": [row for (_, name), row in rows.items() if name in POLICIES],
        "everything": list(rows.values()),
    }
    for kind, found in kinds.items():
        for place, what in enumerate(("tokens/s", "mean latency", "99 % in service")):
            errors = [abs(row["errors"][place]) for row in found]
            if errors:
                print(f"\n{kind}, {what}: {len(errors)} errors, mean {fmean(errors):.1%}, "
                      f"most {max(errors):.1%}")  # fmt: skip


def row_of(bench: Bench, name: str) -> dict[str, Any] | None:
    """Return one run's medians and errors, and its line of the table."""
    turns = _runs(bench, name)
    if not turns:
        return None
    kinds = ("tokens_per_s", "latency_s", "service_p99_s")
    report = bench.simulate(name)
    played = figures(report.to_json(), report.makespan_s)
    made = {key: median(one[key] for one in turns.values()) for key in kinds}
    rates = [one["tokens_per_s"] for one in turns.values()]
    spread = (max(rates) - min(rates)) / made["tokens_per_s"]
    errors = [played[key] / made[key] - 1 for key in kinds]
    base = _runs(bench, _base_of(name))
    gains = [
        one["tokens_per_s"] / base[turn]["tokens_per_s"]
        for turn, one in turns.items()
        if turn in base
    ]
    bound_s = bench.bound_s(name)
    cells = [
        words(bench.plan_of(name)), str(len(turns)),
        f"{made['tokens_per_s']:.0f}", f"{spread:.0%}", f"{played['tokens_per_s']:.0f}",
        f"{errors[0]:+.1%}", f"{made['latency_s']:.2f}",
        f"{played['latency_s']:.2f}", f"{errors[1]:+.1%}",
        ", ".join(f"{one['service_p99_s']:.2f}" for one in turns.values()),
        "" if bound_s is None else f"{bound_s:.2f}",
        ", ".join(f"{gain:.2f}" for gain in gains),
    ]  # fmt: skip
    return {"made": made, "played": played, "errors": errors, "gains": gains,
            "text": " | ".join(cells)}  # fmt: skip


def _runs(bench: Bench, name: str) -> dict[int, dict[str, Any]]:
    """Return the figures of a run, by turn."""
    files = {
        int(file.stem.rpartition("-")[2]): file for file in bench.folder.glob(f"{name}-?.json")
    }
    return {turn: json.loads(file.read_text()) for turn, file in sorted(files.items())}


def _base_of(name: str) -> str:
    """Return the run that a run's gain is over."""
    if name in BIN_RUNS:
        return "bins1"
    return f"static{name.removeprefix('bound')}" if name.startswith("bound") else "static"


def draw(picture: Path, rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Draw simulated against measured on the left, gains on the right."""
    with new_figure(picture, 10, 4.6) as figure:
        left, right = figure.subplots(1, 2)
        for task, marker in zip(TASKS, "os^", strict=True):
            own = [row for (one, _), row in rows.items() if one == task]
            left.scatter(
                [row["made"]["tokens_per_s"] for row in own],
                [row["played"]["tokens_per_s"] for row in own],
                s=28, marker=marker, label=task, alpha=0.8,
            )  # fmt: skip
        rates = [row[key]["tokens_per_s"] for row in rows.values() for key in ("made", "played")]
        low, high = 0.95 * min(rates), 1.05 * max(rates)
        left.plot([low, high], [low, high], color=INK, linewidth=0.8)
        for share, depth in ((0.05, 0.12), (0.1, 0.06)):
            left.fill_between(
                [low, high], [(1 - share) * low, (1 - share) * high],
                [(1 + share) * low, (1 + share) * high],
                color=INK, alpha=depth, label=f"within {share:.0%}",
            )  # fmt: skip
        left.set(xlabel="measured, tokens/s", ylabel="simulated, tokens/s", title="Every run")
        left.legend()
        _draw_gains(right, rows)


def _draw_gains(axes: Any, rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    others = {name for _, name in rows if not name.startswith("static") and name != "bins1"}
    names = [name for name in ALL if name in others]  # a column for what has run
    for shift, (task, marker) in enumerate(zip(TASKS, "os^", strict=True)):
        places = [
            (place + 0.2 * (shift - 1), gain)
            for place, name in enumerate(names)
            for gain in (rows[task, name]["gains"] if (task, name) in rows else ())
        ]
        axes.scatter(
            [x for x, _ in places], [y for _, y in places], s=20, marker=marker, label=task
        )
    for gain, style in ((1.0, "-"), (1.3, ":"), (1.5, "--")):
        axes.axhline(gain, color=INK, linewidth=0.8, linestyle=style)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
    axes.set(ylabel="times static batches of the same turn", title="Gains, every turn")
    axes.legend()


if __name__ == "__main__":
    sys.exit(main())
