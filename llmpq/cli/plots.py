"""Pictures of plans, Pareto fronts, runs and simulated engines.

They need matplotlib (the extra ``plot``), which is imported only when a picture is drawn.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from textwrap import wrap
from typing import Any

from llmpq.assigner.schedules.steady_state import Block, timeline
from llmpq.cli.render import (
    long_seconds,
    memory_pair,
    memory_unit,
    plans_text,
    rate_text,
    stage_bits,
)
from llmpq.errors import SpecError
from llmpq.sim.report import PERCENTILES, SimReport, summary
from llmpq.spec.plan import Fleet, Plan
from llmpq.spec.precision import BITS, Phase
from llmpq.units import MS

BIT_COLOURS = {16: "#1f4e79", 8: "#2e9c8f", 4: "#f2a541", 3: "#d1495b"}
"""Dark and cool for many bits, warm for few; distinct in greyscale too."""

MEMORY_COLOURS = {
    "runtime": "#9aa5b1",
    "weights": "#1f4e79",
    "kv": "#2e9c8f",
    "master": "#8d6cab",
    "temporary": "#f2a541",
}
RUNTIME_SHARE = 0.8
"""Share of every capacity from which the runtime would hide all other parts: the axis leaves it."""
MEMORY_NAMES = {"kv": "KV cache", "master": "embeddings, head, logits", "runtime": "runtime"}
BATCH_COLOURS = (*BIT_COLOURS.values(), "#8d6cab", "#6b8f3c", "#5fa8d3", "#b5651d")
INK = "#22303c"
GREY = "#8a939c"
CAPACITY_COLOUR = "#c1121f"
MIN_BAR_SLOTS = 6
"""Least width of the bar chart, in bars."""
ENGINE_TITLES = ("TTFT, s", "TTFT a prompt token, s", "TGT, s")
_PHASES = ("prefill", "decode")
RUN_COLOURS = {"predicted": "#9ecae1", "measured": "#3182bd"}
DECODE_ROUNDS = 3
ROW_INCHES = 0.38
TITLE_LETTERS = 8.7
"""Letters in an inch of a title."""
LABEL_SHARE = 0.018
"""A block narrower than this share of its axis carries no number."""
STYLE: Any = {
    "font.size": 8.5,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.labelcolor": INK,
    "axes.prop_cycle": f"cycler('color', {list(BATCH_COLOURS)})",
    "axes.labelsize": 9,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.titlesize": 11,
    "figure.titleweight": "bold",
    "legend.fontsize": 8.5,
    "legend.frameon": False,
}
"""Settings of matplotlib for all pictures."""


def draw_plan(plan: Plan, path: str | Path) -> None:
    """Draw a plan: layers by device and bits, memory by cause, and the pipeline's timeline."""
    rows = len(plan.stages)
    heights = [rows + len(plan.dropped_devices), rows, rows, rows]
    ratios = [1.6 + height for height in heights]
    estimate = plan.estimate
    result = (
        f"{long_seconds(estimate.latency_s)}\n{plan.speed_text()}\nquality lost "
        f"{plan.quality_text()}"
    )
    with new_figure(path, 12, 4.1 + ROW_INCHES * sum(heights)) as figure:
        axes = figure.subplots(4, 1, gridspec_kw={"height_ratios": ratios})
        _title(figure, plan, result)
        _draw_layers(axes[0], plan)
        _draw_memory(axes[1], plan)
        blocks = timeline(plan, DECODE_ROUNDS)
        _draw_phase(axes[2], plan, [item for item in blocks if item.phase is Phase.PREFILL])
        _draw_phase(axes[3], plan, [item for item in blocks if item.phase is Phase.DECODE])


def _title(figure: Any, plan: Plan, result: str) -> None:
    work = plan.workload
    text = (
        f"{plan.model.name} on {plan.cluster.name}\n{work.batch} x {work.prompt_tokens} prompt + "
        f"{work.new_tokens} new tokens: {result}"
    )
    _write_title(figure, text)


def _write_title(figure: Any, text: str) -> None:
    """Write the title of a figure, its lines no wider than the figure."""
    letters = int(TITLE_LETTERS * figure.get_figwidth())
    lines = chain.from_iterable(wrap(line, letters) for line in text.splitlines())
    figure.suptitle("\n".join(lines), x=0.01, ha="left")


def _labels(plan: Plan, *, dropped: bool) -> list[str]:
    names = [f"{stage.rank}  {plan.device_of(stage).label}" for stage in plan.stages]
    if dropped:
        names += [plan.cluster.devices[index].label for index in plan.dropped_devices]
    return names


def _name_rows(axis: Any, labels: Sequence[str], title: str) -> None:
    axis.set_title(title)
    axis.set_yticks(range(len(labels)), labels)
    axis.set_ylim(len(labels) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)


def _draw_layers(axis: Any, plan: Plan) -> None:
    for row, stage in enumerate(plan.stages):
        layer = stage.first_layer
        for width, run in groupby(stage.bits):
            length = len(list(run))
            cells = [(layer + index, 1.0) for index in range(length)]
            axis.broken_barh(
                cells, (row - 0.38, 0.76), facecolor=BIT_COLOURS[width], edgecolor="white", lw=0.6
            )
            layer += length
        read = [(stage.first_layer + index, 1.0) for index in stage.on_disk]
        axis.broken_barh(read, (row - 0.38, 0.76), facecolor="none", edgecolor="white", hatch="//")
        text = stage_bits(stage) if stage.num_layers else "master only"
        # Right of the axis, where there are no bars.
        axis.text(1.008, row, text, transform=axis.get_yaxis_transform(), va="center")
    for row in range(len(plan.stages), len(plan.stages) + len(plan.dropped_devices)):
        axis.text(0, row, " left out", va="center", color=GREY, style="italic")
    _name_rows(axis, _labels(plan, dropped=True), "Layers and bits")
    axis.set_xlim(0, plan.model.num_layers)
    axis.set_xlabel("decoder layer")
    if any(stage.on_disk for stage in plan.stages):
        axis.set_xlabel("decoder layer; hatched: weights read from disk")
    _legend(axis, [(f"{b} bits", BIT_COLOURS[b]) for b in BITS if b in plan.bits])


def _draw_memory(axis: Any, plan: Plan) -> None:
    largest = max(item.capacity_bytes for item in plan.estimate.stages)
    unit_bytes, unit, _ = memory_unit(largest)
    for row, stage in enumerate(plan.estimate.stages):
        left = 0.0
        for part, colour in MEMORY_COLOURS.items():
            size = getattr(stage.memory, part) / unit_bytes
            axis.barh(row, size, left=left, height=0.62, color=colour, edgecolor="white", lw=0.4)
            left += size
        capacity = stage.capacity_bytes / unit_bytes
        axis.plot([capacity, capacity], [row - 0.42, row + 0.42], color=CAPACITY_COLOUR, lw=2)
        share = stage.memory.total / stage.capacity_bytes
        text = f"  {memory_pair(stage.memory.total, stage.capacity_bytes)} ({share:.0%})"
        axis.text(max(capacity, left), row, text, va="center")
    _name_rows(axis, _labels(plan, dropped=False), "Memory")
    runtime = min(item.memory.runtime for item in plan.estimate.stages)
    # Rounded to tens, so that the axis begins at a number that can be read.
    begin = 10 * (runtime // unit_bytes // 10) if runtime > RUNTIME_SHARE * largest else 0
    end = largest / unit_bytes
    axis.set_xlim(begin, end + 0.2 * (end - begin))
    axis.set_xlabel(f"{unit}; the axis begins at {begin}, within the runtime" if begin else unit)
    entries = [(MEMORY_NAMES.get(part, part), colour) for part, colour in MEMORY_COLOURS.items()]
    _legend(axis, [*entries, ("capacity", CAPACITY_COLOUR)])


def _draw_phase(axis: Any, plan: Plan, blocks: Sequence[Block]) -> None:
    start_s = min((item.start_s for item in blocks), default=0.0)
    end_s = max((item.end_s for item in blocks), default=0.0)
    span_s = max(end_s - start_s, 1e-12)
    unit_s, unit = (1.0, "s") if span_s >= 1 else (MS, "ms")
    for item in blocks:
        begin, length = (item.start_s - start_s) / unit_s, (item.end_s - item.start_s) / unit_s
        axis.broken_barh(
            [(begin, length)],
            (item.rank - 0.36, 0.72),
            facecolor=BATCH_COLOURS[item.micro_batch % len(BATCH_COLOURS)],
            edgecolor="white",
            lw=0.5,
        )
        if (item.end_s - item.start_s) / span_s > LABEL_SHARE:
            centre = {"ha": "center", "va": "center", "color": "white"}
            axis.text(begin + length / 2, item.rank, str(item.micro_batch), **centre)
    phase = blocks[0].phase if blocks else Phase.DECODE
    number = len({item.micro_batch for item in blocks})
    if phase is Phase.PREFILL:
        size, title = plan.micro_batching.prefill, "Timeline of prefill"
    else:
        size = plan.micro_batching.decode
        rounds = max((item.step for item in blocks), default=0)
        title = f"Timeline of the first {rounds} decode rounds"
    batches = "1 micro-batch" if number == 1 else f"{number} micro-batches"
    _name_rows(axis, _labels(plan, dropped=False), f"{title}: {batches} of {size}")
    axis.set_xlim(0, span_s / unit_s)
    axis.set_xlabel(f"{unit} since the phase began; colour and number are the micro-batch")


def draw_fleet(fleet: Fleet, plans: Sequence[Plan], path: str | Path) -> None:
    """Draw a fleet: layers and bits of each device by replica, and other cuts of the cluster."""
    devices = sum(len(replica.devices) for replica in fleet.replicas)
    rate = sum(replica.arrivals_per_s or 0.0 for replica in fleet.replicas)
    unit = f"TTFT in s at {rate:.4g} requests/s" if rate else "requests/s"
    cuts = [(one.name, one.ttft_s if rate else one.requests_per_s) for one in fleet.others]
    own, bound = (fleet.ttft_s, fleet.ttft_bound_s) if rate else (fleet.requests_per_s, fleet.bound)
    cuts.append((f"this fleet ({len(plans)} replica{'s' * (len(plans) > 1)})", own))
    rows = [devices + len(fleet.idle) + len(plans), len(cuts)]
    with new_figure(path, 12, 2.6 + ROW_INCHES * sum(rows)) as figure:
        layers, bars = figure.subplots(
            2, 1, gridspec_kw={"height_ratios": [1.6 + row for row in rows]}
        )
        _write_title(figure, f"{fleet.model} on {fleet.cluster.name}: {rate_text(own)} {unit}")
        _draw_replicas(layers, fleet, plans)
        names, values = zip(*cuts, strict=True)
        colours = [GREY] * len(fleet.others) + [BIT_COLOURS[16]]
        drawn = bars.barh(names, [value or 0.0 for value in values], color=colours, height=0.6)
        bars.bar_label(drawn, [rate_text(value) for value in values], padding=3)
        if fleet.status != "optimal":
            bars.axvline(bound, color=CAPACITY_COLOUR, lw=1, ls="--", label="bound")
            bars.legend(loc="lower right")
        bars.margins(x=0.12)
        bars.set_xlabel(unit)
        bars.set_title("Ways to cut the cluster")


def _draw_replicas(axes: Any, fleet: Fleet, plans: Sequence[Plan]) -> None:
    """Draw one row a device, replica after replica, with its layers in their bits."""
    names: list[str] = []
    for number, (replica, plan) in enumerate(zip(fleet.replicas, plans, strict=True), start=1):
        stages = {stage.device: stage for stage in plan.stages}
        for place, label in enumerate(replica.devices):
            row = len(names)
            names.append(f"replica {number}: {label}")
            if place not in stages:
                continue
            first = stages[place].first_layer
            for bits, run in groupby(stages[place].bits):
                count = len(list(run))
                axes.barh(row, count, left=first, height=0.7, color=BIT_COLOURS[bits],
                          edgecolor="white", lw=0.5)  # fmt: skip
                first += count
        if number < len(plans):
            axes.axhline(len(names) - 0.5, color=GREY, lw=0.6)
    names += [f"idle: {label}" for label in fleet.idle]
    used = sorted({bits for plan in plans for bits in plan.bits}, reverse=True)
    for bits in used:
        axes.barh(0, 0, color=BIT_COLOURS[bits], label=f"{bits} bits")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, plans[0].model.num_layers)
    axes.set_xlabel("layer")
    axes.set_title("Replicas")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def draw_front(plans: Sequence[Plan], path: str | Path) -> None:
    """Draw throughput against quality and the bits of several plans, best quality first."""
    with new_figure(path, 9.5, 6.4) as figure:
        axes = figure.subplots(2, 1, gridspec_kw={"height_ratios": [3.4, 1.6]})
        _title(figure, plans[0], f"{plans_text(len(plans))}, none dominated")
        _draw_points(axes[0], plans)
        _draw_bits(axes[1], plans)


def _draw_points(axis: Any, plans: Sequence[Plan]) -> None:
    lost = [plan.estimate.quality for plan in plans]
    speed = [plan.throughput_tokens_per_s for plan in plans]
    # No plan lies between two plans of the front, hence a staircase.
    axis.step(lost, speed, where="post", color=GREY, lw=1.2, zorder=1)
    axis.scatter(lost, speed, s=150, color=BIT_COLOURS[16], edgecolor="white", lw=1.0, zorder=2)
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
    axis.set_title("Throughput against quality")
    axis.grid(color="#e6e9ec", lw=0.7)
    axis.set_axisbelow(True)


def _scale_by_root(axis: Any, largest: float) -> None:
    """Use a square-root scale: degradation grows with the square of the quantization step."""
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
    axis.set_xlim(0.4, max(MIN_BAR_SLOTS, len(plans)) + 0.6)
    axis.set_xlabel("plan")
    axis.set_ylabel("layers")
    axis.set_title("Layers by bits")
    _legend(axis, [(f"{bits} bits", BIT_COLOURS[bits]) for bits in used])


def draw_run(report: dict[str, Any], path: str | Path) -> None:
    """Draw predicted and measured seconds, of the whole run and of every stage, by phase.

    Args:
        report: of ``llmpq.dist.metrics.report.build_report``, with or without its phases.
        path: file to write.
    """
    groups = run_groups(report)
    with new_figure(path, 1.6 + 1.5 * len(groups), 3.8) as figure:
        axes = figure.subplots()
        for side, (name, colour) in enumerate(RUN_COLOURS.items()):
            heights = [pair[name] or 0.0 for _, pair in groups]
            places = [place + 0.4 * (side - 0.5) for place in range(len(groups))]
            axes.bar(places, heights, width=0.38, color=colour, label=name)
        for place, (_, pair) in enumerate(groups):
            predicted, measured = pair["predicted"], pair["measured"] or 0.0
            if predicted is not None and measured > 0:
                error = f"{predicted / measured - 1:+.0%}"
                axes.text(place, max(predicted, measured), error, ha="center", va="bottom")
        axes.set_xticks(range(len(groups)), [name for name, _ in groups])
        axes.set_ylabel("seconds")
        axes.set_title("Predicted against measured")
        axes.legend()
        axes.margins(y=0.12)


def run_groups(report: dict[str, Any]) -> list[tuple[str, dict[str, float | None]]]:
    """Return name and value of every pair of bars: the latency, its phases, every stage's work."""
    groups = [("latency", report["latency_s"])]
    groups += [(phase, report["phases"][phase]) for phase in _PHASES if "phases" in report]
    for stage in report["stages"]:
        groups += [
            (f"stage {stage['rank']}\n{phase} work", stage[f"{phase}_busy_s"])
            for phase in _PHASES
            if f"{phase}_busy_s" in stage
        ]
    return groups


def draw_engine(reports: Mapping[float, SimReport], name: str, path: str | Path) -> None:
    """Draw percentiles over the rate (above), and distributions at every rate (below).

    Args:
        reports: by rate scale.
        name: of the scheduler.
        path: file to write.

    Raises:
        SpecError: matplotlib is not installed, or the file cannot be written.
    """
    values = {scale: _engine_values(report) for scale, report in reports.items()}
    with new_figure(path, 11, 6.2) as figure:
        figure.suptitle(f"scheduler {name}")
        axes = figure.subplots(2, 3)
        for place, title in enumerate(ENGINE_TITLES):
            column = {scale: found[place] for scale, found in sorted(values.items())}
            _draw_curves(axes[0][place], title, column)
            _draw_distributions(axes[1][place], title, column)


def _draw_curves(axis: Any, title: str, values: Mapping[float, Sequence[float]]) -> None:
    found = [summary(column) for column in values.values()]
    for percent, colour in zip(PERCENTILES, BATCH_COLOURS, strict=False):
        heights = [row[f"p{percent}"] for row in found]
        axis.plot(list(values), heights, "o-", ms=3, color=colour, label=f"p{percent}")
    _name_axis(axis, title, "rate scale", is_log="y")


def _draw_distributions(axis: Any, title: str, values: Mapping[float, Sequence[float]]) -> None:
    for (scale, column), colour in zip(values.items(), BATCH_COLOURS, strict=False):
        shares = [(number + 1) / len(column) for number in range(len(column))]
        axis.plot(sorted(column), shares, color=colour, lw=1.2, label=f"x {scale:g}")
    _name_axis(axis, "share of requests", title, is_log="x")


def _engine_values(report: SimReport) -> tuple[Sequence[float], ...]:
    """Return the values in the order of ``ENGINE_TITLES``."""
    return (
        report.time_to_first_token_s,
        report.normalized_ttft_s,
        report.total_generation_time_s,
    )


def _name_axis(axis: Any, title: str, label: str, *, is_log: str) -> None:
    (axis.set_yscale if is_log == "y" else axis.set_xscale)("log")
    axis.set_title(title, fontsize=9)
    axis.set_xlabel(label, fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=7, frameon=False)


@contextlib.contextmanager
def new_figure(path: str | Path, width: float, height: float) -> Iterator[Any]:
    """Yield an empty figure, in inches, and write it, making its folder."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise SpecError("--plot: matplotlib is not installed; install llmpq[plot]") from None
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), dpi=130)
        figure.set_layout_engine("constrained", h_pad=0.08, hspace=0.03)
        yield figure
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            # Without the version of matplotlib inside, equal pictures are equal files.
            is_png = Path(path).suffix.lower() == ".png"
            figure.savefig(path, metadata={"Software": None} if is_png else None)
        except (OSError, ValueError) as error:
            raise SpecError(f"--plot: {path}: cannot be written: {error}") from None


def _legend(axis: Any, entries: Sequence[tuple[str, str]]) -> None:
    """Draw a legend of names and colours above an axis, at its right."""
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, label=name) for name, colour in entries]
    place = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": len(entries)}
    axis.legend(handles=handles, borderaxespad=0.2, handlelength=1.1, columnspacing=1.2, **place)
