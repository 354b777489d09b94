"""A plan as a picture: layers by device and bits, memory by cause, and the pipeline's timeline.

Needs matplotlib (the extra ``plot``), which is imported when a picture is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from llmpq.assigner.timeline import Block, timeline
from llmpq.cli.report import compact_bits, memory_pair, memory_unit
from llmpq.errors import SpecError
from llmpq.spec.plan import Plan
from llmpq.spec.precision import BITS, Phase
from llmpq.units import MS

BIT_COLOURS = {16: "#1f4e79", 8: "#2e9c8f", 4: "#f2a541", 3: "#d1495b"}
"""Dark and cool for many bits, warm for few; told apart in greyscale too."""

MEMORY_COLOURS = {
    "weights": "#1f4e79",
    "kv": "#2e9c8f",
    "master": "#8d6cab",
    "temporary": "#f2a541",
    "runtime": "#9aa5b1",
}
MEMORY_NAMES = {"kv": "KV cache", "master": "embeddings, head, logits", "runtime": "runtime"}
BATCH_COLOURS = (
    "#1f4e79",
    "#2e9c8f",
    "#f2a541",
    "#d1495b",
    "#8d6cab",
    "#6b8f3c",
    "#5fa8d3",
    "#b5651d",
)
INK = "#22303c"
DECODE_ROUNDS = 3
ROW_INCHES = 0.38
LABEL_SHARE = 0.018
"""A block narrower than this share of its axis carries no number."""


def draw_plan(plan: Plan, path: str | Path) -> None:
    """Write the picture of a plan.

    Raises:
        SpecError: matplotlib is not installed, or the file cannot be written.
    """
    rows = len(plan.stages)
    everyone = rows + len(plan.dropped_devices)
    heights = [everyone, rows, rows, rows]
    figure = new_figure(12, 3.9 + ROW_INCHES * sum(heights))
    ratios = [1.6 + height for height in heights]
    axes = figure.subplots(4, 1, gridspec_kw={"height_ratios": ratios})
    figure.suptitle(_title(plan), color=INK, fontsize=11, x=0.01, ha="left", weight="bold")
    _draw_layers(axes[0], plan)
    _draw_memory(axes[1], plan)
    blocks = timeline(plan, DECODE_ROUNDS)
    _draw_phase(axes[2], plan, [item for item in blocks if item.phase is Phase.PREFILL])
    _draw_phase(axes[3], plan, [item for item in blocks if item.phase is Phase.DECODE])
    save_figure(figure, path)


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of so many inches, without any global state of matplotlib.

    Raises:
        SpecError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        raise SpecError("--plot: matplotlib is not installed; install llmpq[plot]") from None
    figure = Figure(figsize=(width, height), dpi=130)
    figure.set_layout_engine(ConstrainedLayoutEngine(h_pad=0.08, hspace=0.03))
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a figure, and the folder it goes to.

    Raises:
        SpecError: the file cannot be written.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise SpecError(f"--plot: {path}: cannot be written: {error}") from None


def _title(plan: Plan) -> str:
    work, estimate = plan.workload, plan.estimate
    return (
        f"{plan.model.name} on {plan.cluster.name}\n"
        f"{work.batch} x {work.prompt_tokens} prompt + {work.new_tokens} new tokens: "
        f"{estimate.latency_s:.4g} s, {plan.throughput_tokens_per_s:.4g} tokens/s, "
        f"quality lost {estimate.quality:.3g}"
    )


def _labels(plan: Plan, *, dropped: bool) -> list[str]:
    names = [f"{stage.rank}  {plan.device_of(stage).label}" for stage in plan.stages]
    if dropped:
        names += [plan.cluster.devices[index].label for index in plan.dropped_devices]
    return names


def _style(axis: Any, labels: Sequence[str], title: str) -> None:
    axis.set_title(title, loc="left", fontsize=10, color=INK, weight="bold")
    axis.set_yticks(range(len(labels)), labels, fontsize=8.5, color=INK)
    axis.set_ylim(len(labels) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", labelsize=8.5, colors=INK)
    axis.xaxis.label.set_size(9)
    axis.xaxis.label.set_color(INK)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def legend(axis: Any, entries: Sequence[tuple[str, str]]) -> None:
    """Draw a legend of names and colours above an axis, at its right."""
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, label=name) for name, colour in entries]
    axis.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(entries),
        frameon=False,
        fontsize=8.5,
        borderaxespad=0.2,
        handlelength=1.1,
        columnspacing=1.2,
    )


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
        text = compact_bits(stage.bits) if stage.num_layers else "master only"
        # Beside the axis, where no bar can be under it.
        axis.text(
            1.008,
            row,
            text,
            transform=axis.get_yaxis_transform(),
            va="center",
            fontsize=8.5,
            color=INK,
        )
    for row in range(len(plan.stages), len(plan.stages) + len(plan.dropped_devices)):
        axis.text(0, row, " left out", va="center", fontsize=8.5, color="#8a939c", style="italic")
    _style(axis, _labels(plan, dropped=True), "Layers and bits")
    axis.set_xlim(0, plan.model.num_layers)
    axis.set_xlabel("decoder layer")
    legend(axis, [(f"{b} bits", BIT_COLOURS[b]) for b in BITS if b in plan.bits])


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
        axis.plot([capacity, capacity], [row - 0.42, row + 0.42], color="#c1121f", lw=2)
        share = stage.memory.total / stage.capacity_bytes
        axis.text(
            max(capacity, left),
            row,
            f"  {memory_pair(stage.memory.total, stage.capacity_bytes)} ({share:.0%})",
            va="center",
            fontsize=8.5,
            color=INK,
        )
    _style(axis, _labels(plan, dropped=False), "Memory")
    axis.set_xlim(0, 1.2 * largest / unit_bytes)
    axis.set_xlabel(unit)
    entries = [(MEMORY_NAMES.get(part, part), colour) for part, colour in MEMORY_COLOURS.items()]
    legend(axis, [*entries, ("capacity", "#c1121f")])


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
            axis.text(
                begin + length / 2,
                item.rank,
                str(item.micro_batch),
                ha="center",
                va="center",
                fontsize=8,
                color="white",
            )
    phase = blocks[0].phase if blocks else Phase.DECODE
    number = len({item.micro_batch for item in blocks})
    if phase is Phase.PREFILL:
        size, title = plan.micro_batching.prefill, "Timeline of prefill"
    else:
        size = plan.micro_batching.decode
        rounds = max((item.step for item in blocks), default=0)
        title = f"Timeline of the first {rounds} decode rounds"
    batches = "1 micro-batch" if number == 1 else f"{number} micro-batches"
    _style(axis, _labels(plan, dropped=False), f"{title}: {batches} of {size}")
    axis.set_xlim(0, span_s / unit_s)
    axis.set_xlabel(f"{unit} since the phase began; colour and number tell the micro-batch")
