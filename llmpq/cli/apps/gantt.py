"""The Gantt picture of a schedule: devices over time, coloured by model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmpq.cli.plots import BATCH_COLOURS, GREY, INK, new_figure
from llmpq.multillm.schedule import ApplicationSchedule

ROW_INCHES = 0.34
MEASURED_HEIGHT = 0.28
PALER = 0.5
"""Share of its distance from white that a colour keeps when it is used again."""


@dataclass(frozen=True, slots=True)
class Span:
    """A model on a device for some time.

    Attributes:
        device: label of the device.
        model: name of the model.
        begin_s, end_s: from the begin of the application.
        is_loading: whether it loads.
    """

    device: str
    model: str
    begin_s: float
    end_s: float
    is_loading: bool = False


def spans_of(schedule: ApplicationSchedule) -> list[Span]:
    """Return what a schedule predicts for each device, one span a stage or loading."""
    found = []
    ready_s: dict[str, float] = {}
    for stage in schedule.stages:
        for one in stage.models:
            if one.load_s:
                ready_s[one.model] = stage.start_s + one.load_s
            loaded_s = min(stage.end_s, max(stage.start_s, ready_s.get(one.model, 0.0)))
            for device in one.devices:
                if loaded_s > stage.start_s:
                    found.append(Span(device, one.model, stage.start_s, loaded_s, True))
                if loaded_s < stage.end_s:
                    found.append(Span(device, one.model, loaded_s, stage.end_s))
    return found


def draw_schedule(
    schedule: ApplicationSchedule, path: str | Path, measured: Sequence[Span] = ()
) -> None:
    """Draw a schedule; measured spans lie below the predicted ones of their device."""
    spans = spans_of(schedule)
    devices = sorted({span.device for span in (*spans, *measured)}, key=_natural)
    models = list(dict.fromkeys(span.model for span in spans))
    with new_figure(path, 12, 2.4 + ROW_INCHES * len(devices) * (2 if measured else 1)) as figure:
        axes = figure.subplots()
        colours = {name: _colour(place) for place, name in enumerate(models)}
        height = 0.4 if measured else 0.8
        for span in spans:
            row = devices.index(span.device) - (0.2 if measured else 0.0)
            _bar(axes, span, row, height, colours[span.model])
        for span in measured:
            row = devices.index(span.device) + 0.2
            _bar(axes, span, row, MEASURED_HEIGHT, colours.get(span.model, GREY))
        for stage in schedule.stages[:-1]:
            axes.axvline(stage.end_s, color=INK, lw=0.6, ls=":")
        axes.set_yticks(range(len(devices)), devices)
        axes.set_ylim(len(devices) - 0.4, -0.6)
        axes.set_xlim(0, max(span.end_s for span in (*spans, *measured)))
        axes.set_xlabel("seconds; hatched while loading, dotted where a stage ends")
        measured_s = max((span.end_s for span in measured), default=0.0)
        axes.set_title(
            f"{schedule.application} on {schedule.cluster}, {schedule.method}: "
            f"{schedule.makespan_s:.1f} s predicted"
            + (f" (above), {measured_s:.1f} s measured (below)" if measured else ""),
        )
        _legend(axes, colours)


def _colour(place: int) -> tuple[float, float, float]:
    """Return the colour of a model: those of all pictures, then paler ones."""
    from matplotlib.colors import to_rgb

    times, which = divmod(place, len(BATCH_COLOURS))
    share = PALER**times
    red, green, blue = (1 - share * (1 - part) for part in to_rgb(BATCH_COLOURS[which]))
    return red, green, blue


def _bar(axes: Any, span: Span, row: float, height: float, colour: Any) -> None:
    axes.barh(
        row, span.end_s - span.begin_s, left=span.begin_s, height=height, color=colour,
        alpha=0.45 if span.is_loading else 1.0, hatch="////" if span.is_loading else None,
        edgecolor="white", lw=0.4,
    )  # fmt: skip


def _legend(axes: Any, colours: dict[str, Any]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _natural(label: str) -> tuple[str, int]:
    name, _, number = label.partition("#")
    return name, int(number or 0)
