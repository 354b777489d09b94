"""A run as a picture: predicted beside measured, of the whole and of every stage, by phase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_PHASES = ("prefill", "decode")
_COLOURS = {"predicted": "#9ecae1", "measured": "#3182bd"}


def draw_run(report: dict[str, Any], path: str | Path) -> None:
    """Draw a report of ``llmpq.dist.metrics.report.build_report``.

    Args:
        report: with or without the phases; without, only the latency is drawn.
        path: PNG file to write.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    groups = run_groups(report)
    figure, axes = plt.subplots(figsize=(1.6 + 1.5 * len(groups), 3.8), layout="constrained")
    for side, (name, colour) in enumerate(_COLOURS.items()):
        heights = [pair[name] for _, pair in groups]
        places = [place + 0.4 * (side - 0.5) for place in range(len(groups))]
        axes.bar(places, heights, width=0.38, color=colour, label=name)
    for place, (_, pair) in enumerate(groups):
        if pair["measured"] > 0:
            error = f"{pair['predicted'] / pair['measured'] - 1:+.1%}"
            axes.text(place, max(pair.values()), error, ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(groups)), [name for name, _ in groups], fontsize=8)
    axes.set_ylabel("seconds")
    axes.set_title("Predicted against measured", fontsize=10)
    axes.legend(fontsize=8)
    axes.margins(y=0.12)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def run_groups(report: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """Return the pairs of bars with their names: the latency, its phases, every stage's work."""
    groups = [("latency", report["latency_s"])]
    groups += [(phase, report["phases"][phase]) for phase in _PHASES if "phases" in report]
    for stage in report["stages"]:
        groups += [
            (f"stage {stage['rank']}\n{phase} work", stage[f"{phase}_busy_s"])
            for phase in _PHASES
            if f"{phase}_busy_s" in stage
        ]
    return groups
