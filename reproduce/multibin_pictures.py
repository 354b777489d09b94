"""Multi-bin batching's curves as a picture. Needs matplotlib, the extra ``plot``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from reproduce.output import Record
from reproduce.pictures import GRID, INK

SHADES = ("#b7c9de", "#8fadcc", "#678fb8", "#41729f", "#1f4e79", "#12304d")


def draw(record: Record, loads: Sequence[float], path: Path) -> None:
    """Draw Figures 3, 4, 8 and 9.

    Args:
        record: what ``multibin.collect`` returns.
        loads: shares of the throughput without waste, of the curves' points.
        path: the PNG file.
    """
    figure = Figure(figsize=(10, 7), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    (three, four), (eight, nine) = figure.subplots(2, 2)
    for row, color in zip(record["figures 3, 4"], SHADES, strict=True):
        label = f"{row['bins']} bins" if row["bins"] > 1 else "1 bin"
        three.plot(loads, row["rate"], "o-", color=color, ms=3, label=label)
        three.axhline(row["theorem"], color=color, lw=0.8, ls=":")
        four.plot(loads[:6], row["latency_s"][:6], "o-", color=color, ms=3)
    _name(three, "Figure 3: throughput, requests/s", "dotted: Theorem 4.2")
    four.set_yscale("log")
    _name(four, "Figure 4: mean latency, s", "")
    three.legend(fontsize=8, frameon=False)
    bins = sorted({row["bins"] for row in record["figure 8"]})
    for one, color in zip(bins, SHADES[1:], strict=True):
        rows = [row for row in record["figure 8"] if row["bins"] == one]
        eight.plot(
            [row["error"] for row in rows],
            [row["rate"] / record["one bin"] for row in rows],
            "o-",
            color=color,
            ms=3,
        )
    _name(eight, "Figure 8: throughput over one bin", "", "probability of a neighbouring bin")
    for row, color in zip(record["figure 9"], SHADES, strict=True):
        nine.plot(loads, row["rate"], "o-", color=color, ms=3)
    _name(nine, "Figure 9: exponential times, requests/s", "")
    figure.savefig(path)


def _name(
    axes: Axes,
    title: str,
    note: str,
    label: str = "arrivals, share of what is served without waste",
) -> None:
    axes.set_title(title, loc="left", fontsize=10, weight="bold", color=INK)
    axes.set_xlabel(label, fontsize=9, color=INK)
    axes.grid(True, color=GRID, lw=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if note:
        axes.text(0.98, 0.04, note, transform=axes.transAxes, ha="right", fontsize=8, color=INK)
