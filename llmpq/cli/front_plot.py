"""The plans of ``--pareto`` as a picture: throughput against quality, and the bits of each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmpq.cli.plots import BIT_COLOURS, INK, legend, new_figure, save_figure
from llmpq.cli.report import plans_text
from llmpq.spec.plan import Plan
from llmpq.spec.precision import BITS

LINE = "#8a939c"
DOT = "#1f4e79"
FEWEST_BARS = 6
"""Places for bars, so that one or two plans are not drawn as walls."""


def draw_front(plans: Sequence[Plan], path: str | Path) -> None:
    """Write the picture of several plans, best quality first.

    Raises:
        SpecError: matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(9.5, 6.4)
    axes = figure.subplots(2, 1, gridspec_kw={"height_ratios": [3.4, 1.6]})
    first, work = plans[0], plans[0].workload
    title = (
        f"{first.model.name} on {first.cluster.name}\n{work.batch} x {work.prompt_tokens} prompt + "
        f"{work.new_tokens} new tokens: {plans_text(len(plans))}, none dominated"
    )
    figure.suptitle(title, color=INK, fontsize=11, x=0.01, ha="left", weight="bold")
    _draw_points(axes[0], plans)
    _draw_bits(axes[1], plans)
    save_figure(figure, path)


def _draw_points(axis: Any, plans: Sequence[Plan]) -> None:
    lost = [plan.estimate.quality for plan in plans]
    speed = [plan.throughput_tokens_per_s for plan in plans]
    # Between two plans the better quality is the one to be had: a staircase, not a slope.
    axis.step(lost, speed, where="post", color=LINE, lw=1.2, zorder=1)
    axis.scatter(lost, speed, s=150, color=DOT, edgecolor="white", lw=1.0, zorder=2)
    for number, point in enumerate(zip(lost, speed, strict=True), start=1):
        axis.annotate(
            str(number), point, color="white", fontsize=8, ha="center", va="center", zorder=3
        )
    _scale_by_root(axis, max(lost))
    axis.set_xlabel("quality lost (0 = unquantized, 1 = every layer at 4 bits; square-root scale)")
    axis.set_ylabel("tokens/s")
    low, high = min(speed), max(speed)
    margin = 0.12 * (high - low) or 0.1 * high
    axis.set_ylim(max(0.0, low - margin), high + margin)
    axis.set_title("Throughput against quality", loc="left", fontsize=10, color=INK, weight="bold")
    axis.grid(color="#e6e9ec", lw=0.7)
    axis.set_axisbelow(True)
    _quiet(axis)


def _scale_by_root(axis: Any, largest: float) -> None:
    """Degradation goes with the square of a step: its root spreads the plans evenly."""
    axis.set_xscale("function", functions=(_root, _square))
    top = largest if largest > 0 else 1.0
    axis.set_xlim(-0.0015 * top, 1.12 * top)
    ticks = [tick for tick in (0, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 3, 4, 5) if tick <= 1.12 * top]
    if len(ticks) < 3:
        power = 10 ** math.floor(math.log10(top))
        ticks = [
            0,
            *(share * power for share in (0.1, 0.5, 1, 2, 5) if share * power <= 1.12 * top),
        ]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])


def _root(values: Any) -> Any:
    return abs(values) ** 0.5 * ((values > 0) * 2.0 - 1.0)


def _square(values: Any) -> Any:
    return values * abs(values)


def _draw_bits(axis: Any, plans: Sequence[Plan]) -> None:
    left = [0] * len(plans)
    rows = list(range(1, len(plans) + 1))
    used = [bits for bits in BITS if any(bits in plan.bits for plan in plans)]
    for bits in used:
        counts = [Counter(plan.bits)[bits] for plan in plans]
        axis.bar(rows, counts, 0.72, bottom=left, color=BIT_COLOURS[bits], edgecolor="white")
        left = [done + count for done, count in zip(left, counts, strict=True)]
    axis.set_xticks(rows, [str(row) for row in rows])
    axis.set_xlim(0.4, max(FEWEST_BARS, len(plans)) + 0.6)
    axis.set_xlabel("plan")
    axis.set_ylabel("layers")
    axis.set_title("Layers by bits", loc="left", fontsize=10, color=INK, weight="bold")
    legend(axis, [(f"{bits} bits", BIT_COLOURS[bits]) for bits in used])
    _quiet(axis)


def _quiet(axis: Any) -> None:
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.tick_params(labelsize=8.5, colors=INK)
    for label in (axis.xaxis.label, axis.yaxis.label):
        label.set_size(9)
        label.set_color(INK)
