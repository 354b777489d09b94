"""Figures 8 and 9 as pictures. Needs matplotlib, the extra ``plot``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from reproduce.output import Record

SPEED, QUALITY, PALE, INK, GRID = "#1f4e79", "#d1495b", "#9aa5b1", "#22303c", "#d9dee3"


def draw_sweeps(
    sweeps: Sequence[tuple[str, Sequence[Record]]], marks: dict[float, str], path: Path
) -> None:
    """Draw Figure 8: one column a sweep, throughput above degradation.

    Args:
        sweeps: title and points of each; a point has ``multiple``, ``theta_s``, ``tokens_per_s``
            and ``omega``.
        marks: what to call the multiples of the default price that are marked.
        path: the PNG file.
    """
    figure = _figure(9, 5)
    grid = figure.subplots(2, len(sweeps), sharex="col", squeeze=False)
    for (speed, loss), (title, points) in zip(grid.T, sweeps, strict=True):
        theta = [point["theta_s"] for point in points]
        rates = [point["tokens_per_s"] for point in points]
        speed.plot(theta, rates, "o-", color=SPEED, ms=3.5)
        loss.plot(theta, [point["omega"] for point in points], "o-", color=QUALITY, ms=3.5)
        speed.set_ylim(0, 1.12 * max(rates))
        speed.set_title(title, color=INK, loc="left", fontsize=11, weight="bold")
        loss.set_xscale("log")
        loss.set_yscale("log")
        loss.set_xlabel("theta: seconds that “every layer at 4 bits” costs", color=INK)
        for axes in (speed, loss):
            axes.grid(True, color=GRID, lw=0.6)
            axes.set_axisbelow(True)
            _open(axes)
        for point in points:
            if point["multiple"] in marks:
                for axes in (speed, loss):
                    axes.axvline(point["theta_s"], color=GRID, lw=7, zorder=0)
                where = (point["theta_s"], 0.04)
                speed.annotate(
                    f"paper's {marks[point['multiple']]}",
                    where,
                    xycoords=("data", "axes fraction"),
                    ha="center",
                    fontsize=9,
                    color=INK,
                )
    grid[0][0].set_ylabel("tokens per second, predicted", color=SPEED)
    grid[1][0].set_ylabel("degradation omega", color=QUALITY)
    figure.align_ylabels(grid[:, 0])
    _save(figure, path)


def draw_bars(
    names: Sequence[str], series: Sequence[tuple[str, Sequence[float]]], path: Path
) -> None:
    """Draw Figure 9: for every name a bar of each of two series; 0 is drawn as no plan."""
    figure = _figure(8, 3.6)
    axes = figure.subplots()
    for shift, colour, (label, heights) in zip((-0.2, 0.2), (PALE, SPEED), series, strict=True):
        places = [index + shift for index in range(len(names))]
        bars = axes.bar(places, heights, 0.38, label=label, color=colour)
        texts = [f"{height:.0f}" if height else "no plan" for height in heights]
        axes.bar_label(bars, texts, fontsize=9, color=INK, padding=2)
    axes.set_xticks(range(len(names)), names, fontsize=9, color=INK)
    axes.set_ylabel("tokens per second, predicted", color=INK)
    axes.legend(frameon=False)
    _open(axes)
    _save(figure, path)


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=110)
    FigureCanvasAgg(figure)
    figure.set_layout_engine(ConstrainedLayoutEngine(h_pad=0.06, w_pad=0.08))
    return figure


def _open(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the version of matplotlib inside, equal pictures are equal files.
    figure.savefig(path, metadata={"Software": None})
