"""Figures of the papers as pictures. Needs matplotlib, the extra ``plot``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

from llmpq.cli.plots import INK, new_figure
from reproduce.output import Record

SPEED, QUALITY, PALE, GRID = "#1f4e79", "#d1495b", "#9aa5b1", "#d9dee3"
BAR = 0.38
SCHEDULES = ("static", "RRA", "WAA")
SCHEDULE_COLOURS = (PALE, SPEED, QUALITY)
SLOT = 0.8 / len(SCHEDULES)
"""Width of a bar; a group of them leaves a fifth of its place free."""
WAY_COLOURS = ("#9aa5b1", "#f2a541", "#8e6c8a", "#1f4e79", "#2a9d8f")
ORDER_COLOURS = {
    "LARRY": "#1f4e79",
    "FCFS": "#d1495b",
    "TRAIL+": "#f2a541",
    "No-Preempt": "#9aa5b1",
}
PLACE_SHADES = {"p50": "#8fadcc", "p95": "#41729f", "p99": "#12304d"}
BIN_SHADES = ("#b7c9de", "#8fadcc", "#678fb8", "#41729f", "#1f4e79", "#12304d")
DATA_COLOURS = ("#1f4e79", "#d1495b", "#f2a541")
BALANCER_COLOURS = {
    "SAL": "#1f4e79", "SAL in seconds": "#2a9d8f", "LMetric": "#f2a541", "P2C": "#d1495b",
    "Random": "#9aa5b1", "round robin": "#c3cad1", "least loaded": "#8e6c8a",
}  # fmt: skip
TTFT, TGT = "time_to_first_token_s", "total_generation_time_s"

RATE_LABEL = "arrival rate (1: the rate of the tables)"


def draw_sweeps(
    sweeps: Sequence[tuple[str, Sequence[Record]]], marks: dict[float, str], path: Path
) -> None:
    """Draw LLM-PQ's Figure 8: one column a sweep, throughput above degradation.

    Args:
        sweeps: title and points of each; a point has ``multiple``, ``theta_s``, ``tokens_per_s``
            and ``omega``.
        marks: what to call the multiples of the default price that are marked.
        path: the PNG file.
    """
    with new_figure(path, 9, 5) as figure:
        grid = figure.subplots(2, len(sweeps), sharex="col", squeeze=False)
        for (speed, loss), (title, points) in zip(grid.T, sweeps, strict=True):
            _draw_sweep(speed, loss, points, marks)
            speed.set_title(title)
        grid[0][0].set_ylabel("tokens per second, predicted", color=SPEED)
        grid[1][0].set_ylabel("degradation omega", color=QUALITY)
        figure.align_ylabels(grid[:, 0])


def _draw_sweep(speed: Axes, loss: Axes, points: Sequence[Record], marks: dict[float, str]) -> None:
    theta = [point["theta_s"] for point in points]
    rates = [point["tokens_per_s"] for point in points]
    speed.plot(theta, rates, "o-", color=SPEED, ms=3.5)
    loss.plot(theta, [point["omega"] for point in points], "o-", color=QUALITY, ms=3.5)
    speed.set_ylim(0, 1.12 * max(rates))
    loss.set_xscale("log")
    loss.set_yscale("log")
    loss.set_xlabel("theta: seconds that “every layer at 4 bits” costs")
    for axes in (speed, loss):
        _draw_grid(axes)
    for point in points:
        if point["multiple"] not in marks:
            continue
        for axes in (speed, loss):
            axes.axvline(point["theta_s"], color=GRID, lw=7, zorder=0)
        text, where = f"paper's {marks[point['multiple']]}", (point["theta_s"], 0.04)
        speed.annotate(text, where, xycoords=("data", "axes fraction"), ha="center")


def draw_bars(
    names: Sequence[str], series: Sequence[tuple[str, Sequence[float]]], path: Path
) -> None:
    """Draw LLM-PQ's Figure 9: for every name a bar of each of two series; 0 is drawn as no plan."""
    with new_figure(path, 8, 3.6) as figure:
        axes = figure.subplots()
        for shift, colour, (label, heights) in zip((-0.2, 0.2), (PALE, SPEED), series, strict=True):
            places = [index + shift for index in range(len(names))]
            bars = axes.bar(places, heights, 0.38, label=label, color=colour)
            texts = [f"{height:.0f}" if height else "no plan" for height in heights]
            axes.bar_label(bars, texts, padding=2)
        axes.set_xticks(range(len(names)), names)
        axes.set_ylabel("tokens per second, predicted")
        axes.legend()


def draw_exegpt(record: Record, path: Path) -> None:
    """Draw every schedule for every task and bound, and schedules on other lengths.

    Args:
        record: what ``exegpt.collect`` returns.
        path: the PNG file.
    """
    shifts = record.get("figure 11", [])
    with new_figure(path, 12, 9 if shifts else 4) as figure:
        rows = figure.subfigures(2 if shifts else 1, 1, squeeze=False)[:, 0]
        _draw_bounds(rows[0], record["bounds"])
        if shifts:
            _draw_shifts(rows[1], shifts)


def _draw_bounds(figure: SubFigure, rows: Sequence[Record]) -> None:
    first = rows[0]["case"]
    tasks = list(dict.fromkeys(row["task"] for row in rows if row["case"] == first))
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        of_task = [row for row in rows if (row["case"], row["task"]) == (first, task)]
        for place, row in enumerate(of_task):
            static = row["static"]
            rates = [static["requests_per_s"] if static else 0.0]
            rates += [
                row["schedules"].get(name, {}).get("requests_per_s", 0.0) for name in SCHEDULES[1:]
            ]
            left = place - (len(SCHEDULES) - 1) / 2 * SLOT
            for step, (rate, colour) in enumerate(zip(rates, SCHEDULE_COLOURS, strict=True)):
                label = SCHEDULES[step] if place == 0 else None
                axes.bar(left + step * SLOT, rate, SLOT, color=colour, label=label)
            if row.get("gain"):
                above = (0, 3)
                axes.annotate(
                    f"{row['gain']:.1f}x", (place, max(rates)), above, textcoords="offset points",
                    ha="center",
                )  # fmt: skip
        names = ["none" if row["bound_s"] is None else f"{row['bound_s']:.1f}" for row in of_task]
        axes.set_xticks(range(len(of_task)), names)
        axes.set_title(f"task {task}")
        axes.set_xlabel("bound, s")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    figure.supylabel("requests/s", fontsize=9)
    figure.suptitle(f"Figure 6, {first}; times: the best over static batches")


def _draw_shifts(figure: SubFigure, rows: Sequence[Record]) -> None:
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    changes = list(dict.fromkeys(row["what"] for row in rows))
    grid = figure.subplots(len(policies), len(changes), squeeze=False)
    for line, policy in zip(grid, policies, strict=True):
        for axes, what in zip(line, changes, strict=True):
            _draw_shift(
                axes, policy, [r for r in rows if (r["policy"], r["what"]) == (policy, what)]
            )
    figure.suptitle("Figure 11: answers that are not those planned for (task T)")


def _draw_shift(axes: Axes, policy: str, rows: Sequence[Record]) -> None:
    places = range(len(rows))
    left, right = [p - BAR / 2 for p in places], [p + BAR / 2 for p in places]
    kept, again = [row["kept"] for row in rows], [row.get("replanned") or 0.0 for row in rows]
    axes.bar(left, kept, BAR, color=PALE, label="kept schedule")
    axes.bar(right, again, BAR, color=SPEED, label="planned anew")
    axes.set_xticks(places, [f"{row['shift']:g}" for row in rows])
    axes.set_title(policy)
    axes.set_xlabel(f"{rows[0]['what']} of the answers, times what was planned for")
    axes.set_ylabel("requests/s")
    late = axes.twinx()
    late.plot(places, [row["p99"] for row in rows], "o-", color=QUALITY, ms=4)
    late.axhline(1.0, color=GRID, lw=0.8)
    late.set_ylabel("p99 of seconds in service,\nkept, times the planned", color=QUALITY)
    late.spines["right"].set_visible(True)
    # Headroom for the legend, so that it lies on no bar and no line.
    axes.set_ylim(0, 1.6 * max(kept + again))
    late.set_ylim(0, 1.8)
    axes.legend(loc="upper right", ncols=2)


def draw_fleet_rates(record: Record, path: Path) -> None:
    """Draw mean and 95th percentile of TTFT over the rate, and the bound of the capacity.

    Args:
        record: what ``fleet_rates.collect`` returns.
        path: the PNG file.
    """
    devices = " and ".join(f"{count} {name}" for name, count in record["devices"].items())
    figures = ("mean", "mean"), ("p95", "95th percentile")
    with new_figure(path, 10, 4.4) as figure:
        figure.suptitle(f"{record['model']} on {devices}, simulated")
        grid = figure.subplots(1, 2, sharey=True)
        for axes, (key, title) in zip(grid, figures, strict=True):
            for place, (name, curve) in enumerate(record["curves"].items()):
                is_ours = name.startswith("fleet")
                axes.plot(
                    [point["rate"] for point in curve],
                    [point["ttft_s"][key] for point in curve],
                    "o-" if is_ours else "s--", color=WAY_COLOURS[place], label=name,
                    lw=1.8 if is_ours else 1.2, ms=4 if is_ours else 9,
                    mfc=None if is_ours else "none",
                )  # fmt: skip
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
            axes.set_title(f"TTFT, {title}")
            axes.set_xlabel("requests a second")
            _draw_grid(axes)
        grid[1].axhline(record["ttft_bound_s"], color=INK, lw=1, ls=":")
        grid[1].text(
            1, record["ttft_bound_s"], "bound", ha="right", va="bottom",
            transform=grid[1].get_yaxis_transform(),
        )  # fmt: skip
        grid[0].set_ylabel("seconds")
        grid[0].legend()


def draw_larry(record: Record, path: Path) -> None:
    """Draw TTFT over the rate for each order, and over alpha, one column a server and law.

    Args:
        record: what ``larry.collect`` returns.
        path: the PNG file.
    """
    cases = record["cases"]
    with new_figure(path, 3.2 * len(cases), 8) as figure:
        grid = figure.subplots(3, len(cases), squeeze=False)
        for column, entry in enumerate(cases):
            for row, place in enumerate(("p50", "p95")):
                axes = grid[row][column]
                for name, color in ORDER_COLOURS.items():
                    heights = [_mean_ttft_s(runs, place) for runs in entry["curves"][name]]
                    # Dashed: on SW-Code it lies on FCFS.
                    style = "o--" if name == "No-Preempt" else "o-"
                    axes.plot(record["curve"], heights, style, color=color, ms=3, label=name)
                axes.set_yscale("log")
                _name_logarithmic(
                    axes, f"TTFT {place}, s", "arrival rate (1: the rate of the tables)"
                )
            grid[0][column].set_title(f"{entry['server']}\n{entry['law']}")
            _draw_alphas(grid[2][column], entry)
        grid[0][0].legend()
        grid[2][0].legend()


def _draw_alphas(axes: Axes, entry: dict[str, Any]) -> None:
    alphas = [float(alpha) for alpha in entry["alphas"]]
    for place, color in PLACE_SHADES.items():
        heights = [_mean_ttft_s(runs, place) for runs in entry["alphas"].values()]
        axes.plot(alphas, heights, "o-", color=color, ms=3, label=place)
    axes.set_xscale("symlog", linthresh=0.1)
    axes.set_yscale("log")
    _name_logarithmic(axes, "LARRY's TTFT, s", "alpha")


def _mean_ttft_s(runs: Sequence[dict[str, Any]], place: str) -> float:
    return fmean(run["time_to_first_token_s"][place] for run in runs)


def _name_logarithmic(axes: Axes, title: str, label: str) -> None:
    axes.set_ylabel(title)
    axes.set_xlabel(label)
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter(FormatStrFormatter("%g"))
    axes.tick_params(which="minor", labelsize=7)
    _draw_grid(axes)


def draw_multibin(record: Record, loads: Sequence[float], path: Path) -> None:
    """Draw Figures 3, 4, 7, 8, 9 and 10 of multi-bin batching.

    Args:
        record: what ``multibin.collect`` returns.
        loads: shares of the throughput without waste, of the curves' points.
        path: the PNG file.
    """
    with new_figure(path, 14, 7) as figure:
        (three, four, seven), (eight, nine, ten) = figure.subplots(2, 3)
        for row, color in zip(record["figures 3, 4"], BIN_SHADES, strict=True):
            label = f"{row['bins']} bins" if row["bins"] > 1 else "1 bin"
            three.plot(loads, row["rate"], "o-", color=color, ms=3, label=label)
            three.axhline(row["theorem"], color=color, lw=0.8, ls=":")
            four.plot(loads[:6], row["latency_s"][:6], "o-", color=color, ms=3)
        _title(three, "Figure 3: throughput, requests/s", "dotted: Theorem 4.2")
        four.set_yscale("log")
        _title(four, "Figure 4: mean latency, s", "")
        three.legend()
        bins = sorted({row["bins"] for row in record["figure 8"]})
        for one, color in zip(bins, BIN_SHADES[1:], strict=True):
            rows = [row for row in record["figure 8"] if row["bins"] == one]
            eight.plot(
                [row["error"] for row in rows],
                [row["rate"] / record["one bin"] for row in rows],
                "o-",
                color=color,
                ms=3,
            )
        _title(eight, "Figure 8: throughput over one bin", "", "probability of a neighbouring bin")
        for row, color in zip(record["figure 9"], BIN_SHADES, strict=True):
            nine.plot(loads, row["rate"], "o-", color=color, ms=3)
        _title(nine, "Figure 9: exponential times, requests/s", "")
        _draw_learned(seven, record["figures 7, 11"])
        _draw_confusion(ten, record["figure 10"][0])


def _draw_learned(axes: Axes, rows: Sequence[Record]) -> None:
    """Draw throughput over one bin, with known and with predicted lengths."""
    model = rows[0]["model"]
    for name, color in zip(dict.fromkeys(row["data"] for row in rows), DATA_COLOURS, strict=True):
        own = [row for row in rows if (row["data"], row["model"]) == (name, model)]
        one = own[0]["rates"]["oracle"]
        for kind, style in (("oracle", "o-"), ("learned", "o--")):
            found = [(row["bins"], row["rates"].get(kind, one) / one) for row in own]
            axes.plot(*zip(*found, strict=True), style, color=color, ms=3,
                      label=name if kind == "oracle" else None)  # fmt: skip
    axes.set_xscale("log", base=2)
    bins = sorted({row["bins"] for row in rows})
    axes.set_xticks(bins, list(map(str, bins)))
    axes.legend(loc="upper left")
    _title(axes, "Figures 7, 11: over one bin (dashed: learned)", "", "bins")


def _draw_confusion(axes: Axes, score: Record) -> None:
    """Draw true and predicted bins, of four."""
    (found,) = (one for one in score["bins"] if one["bins"] == 4)
    shares = [[share / sum(row) for share in row] for row in found["shares"]]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for true, row in enumerate(shares):
        for guess, share in enumerate(row):
            axes.text(guess, true, f"{share:.0%}", ha="center", va="center",
                      color="white" if share > 0.5 else INK)  # fmt: skip
    axes.set_title(f"Figure 10: {score['data']}")
    axes.set_xlabel("predicted bin")
    axes.set_ylabel("true bin")
    axes.set_xticks(range(4), ["1", "2", "3", "4"])
    axes.set_yticks(range(4), ["1", "2", "3", "4"])


def _title(
    axes: Axes,
    title: str,
    note: str,
    label: str = "arrivals, share of what is served without waste",
) -> None:
    axes.set_title(title)
    axes.set_xlabel(label)
    _draw_grid(axes)
    if note:
        axes.text(0.98, 0.04, note, transform=axes.transAxes, ha="right")


def draw_sal(record: Record, path: Path) -> None:
    """Draw p95 of TTFT and mean TGT over the rate, and p95 on different servers.

    Args:
        record: what ``sal.collect`` returns.
        path: the PNG file.
    """
    cases = record["cases"]
    columns = max(len(cases), len(record["unequal"]))
    with new_figure(path, 3.4 * columns, 8.5) as figure:
        grid = figure.subplots(3, columns, squeeze=False)
        for column, entry in enumerate(cases):
            for row, (metric, place, title) in enumerate(
                ((TTFT, "p95", "TTFT p95, s"), (TGT, "mean", "TGT mean, s"))
            ):
                axes = grid[row][column]
                for name, curve in entry["runs"][0]["curves"].items():
                    heights = [found[metric][place] for found in curve]
                    axes.plot(
                        record["curve"],
                        heights,
                        "o-",
                        color=BALANCER_COLOURS[name],
                        ms=3,
                        label=name,
                    )
                _label(axes, f"{title} (LARRY)", RATE_LABEL)
            grid[0][column].set_title(f"{entry['fleet']}\n{entry['law']}")
        grid[0][0].legend()
        for column in range(columns):
            axes = grid[2][column]
            if column < len(record["unequal"]):
                _draw_unequal(axes, record["unequal"][column])
            else:
                axes.set_axis_off()


def _draw_unequal(axes: Axes, entry: dict[str, Any]) -> None:
    names = list(entry["runs"][0]["figures"]["LARRY"])
    heights = [
        fmean(run["figures"]["LARRY"][name][TTFT]["p95"] for run in entry["runs"]) for name in names
    ]
    axes.barh(names, heights, color=[BALANCER_COLOURS[name] for name in names])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.set_title(f"different servers, {entry['law']}")
    _label(axes, "", "TTFT p95, s (LARRY)")


def _label(axes: Axes, title: str, label: str) -> None:
    axes.set_ylabel(title)
    axes.set_xlabel(label)
    _draw_grid(axes)


def _draw_grid(axes: Axes) -> None:
    """Draw grid lines, below everything."""
    axes.grid(color=GRID, lw=0.6)
    axes.set_axisbelow(True)
