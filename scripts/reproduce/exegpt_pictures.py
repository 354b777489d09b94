"""ExeGPT's Figures 6 to 8 and 11 as a picture. Needs matplotlib, the extra ``plot``."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from scripts.reproduce.output import Record
from scripts.reproduce.pictures import GRID, INK, PALE, QUALITY, SPEED

WIDTH = 0.38


def draw(record: Record, path: Path) -> None:
    """Draw static batches beside RRA for every task and bound, and schedules on other lengths.

    Args:
        record: what ``exegpt.collect`` returns.
        path: the PNG file.
    """
    tasks = list(dict.fromkeys(row["task"] for row in record["bounds"]))
    figure = Figure(figsize=(12, 6.4), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    upper, lower = figure.subfigures(2, 1)
    for axes, task in zip(upper.subplots(1, len(tasks)), tasks, strict=True):
        rows = [row for row in record["bounds"] if row["task"] == task]
        for place, row in enumerate(rows):
            axes.bar(place - WIDTH / 2, row.get("static", 0.0), WIDTH, color=PALE)
            axes.bar(place + WIDTH / 2, row.get("rra", 0.0), WIDTH, color=SPEED)
            top = max(row.get("static", 0.0), row.get("rra", 0.0))
            if "gain" in row:
                axes.text(place, 1.02 * top, f"{row['gain']:.1f}x", ha="center", fontsize=8)
        names = ["none" if row["bound_s"] is None else f"{row['bound_s']:.1f}" for row in rows]
        axes.set_xticks(range(len(rows)), names, fontsize=8)
        axes.set_title(task, loc="left", fontsize=10, weight="bold", color=INK)
        axes.set_xlabel("bound, s", fontsize=9, color=INK)
        axes.spines[["top", "right"]].set_visible(False)
    upper.supylabel("requests/s", fontsize=9, color=INK)
    upper.suptitle("Static batches (grey) and RRA (blue) under four bounds", fontsize=10)
    for axes, what in zip(lower.subplots(1, 2), ("mean", "deviation"), strict=True):
        rows = [row for row in record["figure 11"] if row["what"] == what]
        places = range(len(rows))
        left, right = [p - WIDTH / 2 for p in places], [p + WIDTH / 2 for p in places]
        axes.bar(left, [row["kept"] for row in rows], WIDTH, color=PALE, label="kept schedule")
        again = [row["replanned"] or 0.0 for row in rows]
        axes.bar(right, again, WIDTH, color=SPEED, label="planned anew")
        axes.set_xticks(places, [f"{row['shift']:g}" for row in rows])
        axes.set_xlabel(f"{what} of the answers, times what was planned for", fontsize=9, color=INK)
        axes.set_ylabel("requests/s", fontsize=9, color=INK)
        late = axes.twinx()
        late.plot(places, [row["p99"] for row in rows], "o-", color=QUALITY, ms=4)
        late.axhline(1.0, color=GRID, lw=0.8)
        late.set_ylabel("99 % in service, kept schedule", fontsize=9, color=QUALITY)
        axes.spines["top"].set_visible(False)
        late.spines["top"].set_visible(False)
        axes.set_ylim(0, 1.35 * max([row["kept"] for row in rows] + again))
        late.set_ylim(0, 1.5)
        axes.legend(fontsize=8, frameon=False, loc="upper right", ncols=2)
    lower.suptitle("Figure 11: answers that are not those planned for (task T)", fontsize=10)
    figure.savefig(path)
