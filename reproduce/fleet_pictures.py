"""TTFT against the rate of arrivals as a picture. Needs matplotlib, the extra ``plot``."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter

from reproduce.output import Record
from reproduce.pictures import GRID, INK

COLOURS = ("#9aa5b1", "#f2a541", "#8e6c8a", "#1f4e79", "#2a9d8f")


def draw(record: Record, path: Path) -> None:
    """Draw mean and 95th percentile of TTFT over the rate, and the bound of the capacity.

    Args:
        record: what ``fleet_rates.collect`` returns.
        path: the PNG file.
    """
    figure = Figure(figsize=(10, 4.4), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    devices = " and ".join(f"{count} {name}" for name, count in record["devices"].items())
    figure.suptitle(f"{record['model']} on {devices}, simulated", color=INK, fontsize=11)
    grid = figure.subplots(1, 2, sharey=True)
    figures = ("mean", "mean"), ("p95", "95th percentile")
    for axes, (key, title) in zip(grid, figures, strict=True):
        for place, (name, curve) in enumerate(record["curves"].items()):
            is_ours = name.startswith("fleet")
            axes.plot(
                [point["rate"] for point in curve],
                [point["ttft_s"][key] for point in curve],
                "o-" if is_ours else "s--", color=COLOURS[place], lw=1.8 if is_ours else 1.2,
                ms=4 if is_ours else 9, mfc=None if is_ours else "none",
                label=name,
            )  # fmt: skip
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.set_title(f"TTFT, {title}", fontsize=10, color=INK)
        axes.set_xlabel("requests a second", fontsize=9)
        axes.grid(color=GRID, lw=0.6)
    grid[1].axhline(record["ttft_bound_s"], color=INK, lw=1, ls=":")
    grid[0].set_ylabel("seconds", fontsize=9)
    grid[0].legend(fontsize=8, frameon=False)
    figure.savefig(path)
