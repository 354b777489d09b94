"""SAL's curves as a picture. Needs matplotlib, the extra ``plot``."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

from reproduce.output import Record
from reproduce.pictures import GRID, INK

COLOURS = {
    "SAL": "#1f4e79", "SAL in seconds": "#2a9d8f", "LMetric": "#f2a541", "P2C": "#d1495b",
    "Random": "#9aa5b1", "round robin": "#c3cad1", "least loaded": "#8e6c8a",
}  # fmt: skip
TTFT, TGT = "time_to_first_token_s", "total_generation_time_s"


def draw(record: Record, path: Path) -> None:
    """Draw p95 of TTFT and mean TGT over the rate, and p95 on different servers.

    Args:
        record: what ``sal.collect`` returns.
        path: the PNG file.
    """
    cases = record["cases"]
    columns = max(len(cases), len(record["unequal"]))
    figure = Figure(figsize=(3.4 * columns, 8.5), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    grid = figure.subplots(3, columns, squeeze=False)
    for column, entry in enumerate(cases):
        for row, (metric, place, title) in enumerate(
            ((TTFT, "p95", "TTFT p95, s"), (TGT, "mean", "TGT mean, s"))
        ):
            axes = grid[row][column]
            for name, curve in entry["runs"][0]["curves"].items():
                heights = [found[metric][place] for found in curve]
                axes.plot(record["curve"], heights, "o-", color=COLOURS[name], ms=3, label=name)
            _name(axes, f"{title} (LARRY)", "arrival rate (1: the rate of the tables)")
        grid[0][column].set_title(f"{entry['fleet']}\n{entry['law']}", fontsize=9, color=INK)
    grid[0][0].legend(fontsize=8, frameon=False)
    for column in range(columns):
        axes = grid[2][column]
        if column < len(record["unequal"]):
            _draw_unequal(axes, record["unequal"][column])
        else:
            axes.set_axis_off()
    figure.savefig(path)


def _draw_unequal(axes: Axes, entry: dict[str, Any]) -> None:
    names = list(entry["runs"][0]["figures"]["LARRY"])
    heights = [
        fmean(run["figures"]["LARRY"][name][TTFT]["p95"] for run in entry["runs"]) for name in names
    ]
    axes.barh(names, heights, color=[COLOURS[name] for name in names])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.set_title(f"different servers, {entry['law']}", fontsize=9, color=INK)
    _name(axes, "", "TTFT p95, s (LARRY)")


def _name(axes: Axes, title: str, label: str) -> None:
    axes.set_ylabel(title, fontsize=8)
    axes.set_xlabel(label, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(color=GRID, lw=0.6)
