"""LARRY's curves as a picture. Needs matplotlib, the extra ``plot``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator

from reproduce.output import Record
from reproduce.pictures import GRID, INK

COLOURS = {"LARRY": "#1f4e79", "FCFS": "#d1495b", "TRAIL+": "#f2a541", "No-Preempt": "#9aa5b1"}
SHADES = {"p50": "#8fadcc", "p95": "#41729f", "p99": "#12304d"}


def draw(record: Record, path: Path) -> None:
    """Draw TTFT over the rate for each order, and over alpha, one column a server and law.

    Args:
        record: what ``larry.collect`` returns.
        path: the PNG file.
    """
    cases = record["cases"]
    figure = Figure(figsize=(3.2 * len(cases), 8), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    grid = figure.subplots(3, len(cases), squeeze=False)
    for column, entry in enumerate(cases):
        for row, place in enumerate(("p50", "p95")):
            axes = grid[row][column]
            for name, color in COLOURS.items():
                heights = [_ttft(runs, place) for runs in entry["curves"][name]]
                # Dashed: on SW-Code it lies on FCFS.
                style = "o--" if name == "No-Preempt" else "o-"
                axes.plot(record["curve"], heights, style, color=color, ms=3, label=name)
            axes.set_yscale("log")
            _name(axes, f"TTFT {place}, s", "arrival rate (1: the rate of the tables)")
        grid[0][column].set_title(f"{entry['server']}\n{entry['law']}", fontsize=9, color=INK)
        _draw_alphas(grid[2][column], entry)
    grid[0][0].legend(fontsize=8, frameon=False)
    grid[2][0].legend(fontsize=8, frameon=False)
    figure.savefig(path)


def _draw_alphas(axes: Axes, entry: dict[str, Any]) -> None:
    alphas = [float(alpha) for alpha in entry["alphas"]]
    for place, color in SHADES.items():
        heights = [_ttft(runs, place) for runs in entry["alphas"].values()]
        axes.plot(alphas, heights, "o-", color=color, ms=3, label=place)
    axes.set_xscale("symlog", linthresh=0.1)
    axes.set_yscale("log")
    _name(axes, "LARRY's TTFT, s", "alpha")


def _ttft(runs: Sequence[dict[str, Any]], place: str) -> float:
    return fmean(run["time_to_first_token_s"][place] for run in runs)


def _name(axes: Axes, title: str, label: str) -> None:
    axes.set_ylabel(title, fontsize=8)
    axes.set_xlabel(label, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter(FormatStrFormatter("%g"))
    axes.tick_params(which="minor", labelsize=7)
    axes.grid(color=GRID, lw=0.6)
