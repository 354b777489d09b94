"""Pictures of a simulated engine. They need matplotlib, the extra ``plot``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmpq.cli.plots import BATCH_COLOURS, new_figure
from llmpq.sim.report import PERCENTILES, SimReport, summary

TITLES = ("TTFT, s", "TTFT a prompt token, s", "TGT, s")


def draw_engine(reports: Mapping[float, SimReport], name: str, path: str | Path) -> None:
    """Draw percentiles over the rate (above), and distributions at every rate (below).

    Args:
        reports: by rate scale.
        name: of the scheduler.
        path: file to write.

    Raises:
        SpecError: matplotlib is not installed, or the file cannot be written.
    """
    values = {scale: values_of(report) for scale, report in reports.items()}
    with new_figure(path, 11, 6.2) as figure:
        figure.suptitle(f"scheduler {name}")
        axes = figure.subplots(2, 3)
        for place, title in enumerate(TITLES):
            column = {scale: found[place] for scale, found in sorted(values.items())}
            _draw_curves(axes[0][place], title, column)
            _draw_distributions(axes[1][place], title, column)


def _draw_curves(axis: Any, title: str, values: Mapping[float, Sequence[float]]) -> None:
    found = [summary(column) for column in values.values()]
    for percent, colour in zip(PERCENTILES, BATCH_COLOURS, strict=False):
        heights = [row[f"p{percent}"] for row in found]
        axis.plot(list(values), heights, "o-", ms=3, color=colour, label=f"p{percent}")
    _name(axis, title, "rate scale", is_log="y")


def _draw_distributions(axis: Any, title: str, values: Mapping[float, Sequence[float]]) -> None:
    for (scale, column), colour in zip(values.items(), BATCH_COLOURS, strict=False):
        shares = [(number + 1) / len(column) for number in range(len(column))]
        axis.plot(sorted(column), shares, color=colour, lw=1.2, label=f"x {scale:g}")
    _name(axis, "share of requests", title, is_log="x")


def values_of(report: SimReport) -> tuple[Sequence[float], ...]:
    """Return the values in the order of ``TITLES``."""
    return (
        report.time_to_first_token_s,
        report.normalized_ttft_s,
        report.total_generation_time_s,
    )


def _name(axis: Any, title: str, label: str, *, is_log: str) -> None:
    (axis.set_yscale if is_log == "y" else axis.set_xscale)("log")
    axis.set_title(title, fontsize=9)
    axis.set_xlabel(label, fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=7, frameon=False)
