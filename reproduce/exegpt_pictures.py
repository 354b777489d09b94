"""ExeGPT's Figures 6 to 8 and 11 as a picture. Needs matplotlib, the extra ``plot``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure

from reproduce.output import Record
from reproduce.pictures import GRID, INK, PALE, QUALITY, SPEED

WIDTH = 0.38
SERIES = ("static", "RRA", "WAA-C", "WAA-M")
COLOURS = (PALE, SPEED, QUALITY, "#e3a23c")
SLOT = 0.8 / len(SERIES)
"""Width of a bar; a group of them leaves a fifth of its place free."""


def draw(record: Record, path: Path) -> None:
    """Draw every schedule for every task and bound, and schedules on other lengths.

    Args:
        record: what ``exegpt.collect`` returns.
        path: the PNG file.
    """
    figure = Figure(figsize=(14, 10), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    upper, lower = figure.subfigures(2, 1, height_ratios=(5, 6))
    _bounds(upper, record["bounds"])
    _shifts(lower, record["figure 11"])
    figure.savefig(path)


def _bounds(figure: SubFigure, rows: Sequence[Record]) -> None:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    for axes, task in zip(figure.subplots(1, len(tasks)), tasks, strict=True):
        of_task = [row for row in rows if row["task"] == task]
        for place, row in enumerate(of_task):
            rates = [row.get("static", 0.0)]
            rates += [
                row["schedules"].get(name, {}).get("requests_per_s", 0.0) for name in SERIES[1:]
            ]
            left = place - (len(SERIES) - 1) / 2 * SLOT
            for step, (rate, colour) in enumerate(zip(rates, COLOURS, strict=True)):
                label = SERIES[step] if place == 0 else None
                axes.bar(left + step * SLOT, rate, SLOT, color=colour, label=label)
            if row.get("gains"):
                text = f"{max(row['gains'].values()):.1f}x"
                axes.annotate(
                    text, (place, max(rates)), (0, 3), textcoords="offset points", ha="center",
                    fontsize=8,
                )  # fmt: skip
        names = ["none" if row["bound_s"] is None else f"{row['bound_s']:.1f}" for row in of_task]
        axes.set_xticks(range(len(of_task)), names, fontsize=8)
        axes.set_title(f"task {task}", loc="left", fontsize=10, weight="bold", color=INK)
        axes.set_xlabel("bound, s", fontsize=9, color=INK)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.supylabel("requests/s", fontsize=9, color=INK)
    figure.suptitle("Figures 6 to 8: four bounds; times: the best over static batches", fontsize=11)


def _shifts(figure: SubFigure, rows: Sequence[Record]) -> None:
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    grid = figure.subplots(len(policies), 2, squeeze=False)
    for line, policy in zip(grid, policies, strict=True):
        for axes, what in zip(line, ("mean", "deviation"), strict=True):
            _shift(axes, policy, [r for r in rows if (r["policy"], r["what"]) == (policy, what)])
    figure.suptitle("Figure 11: answers that are not those planned for (task T)", fontsize=11)


def _shift(axes: Axes, policy: str, rows: Sequence[Record]) -> None:
    places = range(len(rows))
    left, right = [p - WIDTH / 2 for p in places], [p + WIDTH / 2 for p in places]
    kept, again = [row["kept"] for row in rows], [row["replanned"] or 0.0 for row in rows]
    axes.bar(left, kept, WIDTH, color=PALE, label="kept schedule")
    axes.bar(right, again, WIDTH, color=SPEED, label="planned anew")
    axes.set_xticks(places, [f"{row['shift']:g}" for row in rows])
    axes.set_title(policy, loc="left", fontsize=10, weight="bold", color=INK)
    axes.set_xlabel(f"{rows[0]['what']} of the answers, times what was planned for", fontsize=9)
    axes.set_ylabel("requests/s", fontsize=9, color=INK)
    late = axes.twinx()
    late.plot(places, [row["p99"] for row in rows], "o-", color=QUALITY, ms=4)
    late.axhline(1.0, color=GRID, lw=0.8)
    late.set_ylabel(
        "p99 of seconds in service,\nkept, times the planned", fontsize=8, color=QUALITY
    )
    axes.spines["top"].set_visible(False)
    late.spines["top"].set_visible(False)
    # Headroom for the legend, so that it lies on no bar and no line.
    axes.set_ylim(0, 1.6 * max(kept + again))
    late.set_ylim(0, 1.8)
    axes.legend(fontsize=8, frameon=False, loc="upper right", ncols=2)
