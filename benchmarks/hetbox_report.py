"""What benchmarks/hetbox.py measured: plans side by side, and every rival at its own quality.

    .venv/bin/python benchmarks/hetbox_report.py FOLDER --picture FILE

A rival that keeps more or fewer bits than the plan of the search answers another question, so each
is also held against the plan of the search that loses no more quality than it does (of several the
one forecast to be fastest). One plan is slower than another when its fastest run is slower than the
other's slowest; else they are equal within noise.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmpq.cli.plots import BIT_COLOURS, CAPACITY_COLOUR, INK, new_figure
from llmpq.spec.plan import Plan, read_plan

OURS = "llmpq"
AS = "llmpq-as-"
"""Begins the name of a plan of the search at a rival's quality; the rival's name ends it."""
METHODS = (
    OURS, "pipeedge", "uniform", "adaptive_even", "memory_proportional", "speed_proportional",
    "fastest", "adabits", "heuristic",
)  # fmt: skip
SAME_QUALITY = 1e-6
CLOSE = 1.3
"""A rival this many times slower in the first run than ours at its quality is not run again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One distinct plan of a cluster.

    Attributes:
        methods: that made it; the files are named after the first.
        plan: itself.
        seconds: of its runs by turn.
        failures: runs that came to no end.
    """

    methods: tuple[str, ...]
    plan: Plan
    seconds: dict[int, float]
    failures: int

    @property
    def is_ours(self) -> bool:
        """Whether the search made it."""
        return self.methods[0] == OURS or self.methods[0].startswith(AS)

    @property
    def median_s(self) -> float:
        """Of its runs."""
        return statistics.median(self.seconds.values())

    @property
    def predicted_s(self) -> float:
        """What the plan says of itself."""
        return self.plan.estimate.predicted_s

    @property
    def quality(self) -> float:
        """What it loses: 1 is every layer at 4 bits."""
        return self.plan.estimate.quality

    @property
    def rivals(self) -> list[str]:
        """The methods that are not the search."""
        return [method for method in self.methods if method in METHODS[1:]]


def slug(name: str) -> str:
    """Return a name as a folder's."""
    return "".join(char if char.isalnum() else "-" for char in name)


def distinct(folder: Path) -> dict[str, list[str]]:
    """Return the methods that planned, those with the same plan together under the first."""
    found: dict[str, list[str]] = {}
    alike: dict[object, str] = {}
    names = (OURS, *(AS + rival for rival in METHODS[1:]), *METHODS[1:])
    for name in names:
        file = folder / f"plan__{name}.json"
        if file.exists():
            first = alike.setdefault(decisions(read_plan(file)), name)
            found.setdefault(first, []).append(name)
    return found


def decisions(plan: Plan) -> object:
    """Return what makes two plans run alike: equal devices may change places."""
    devices = tuple(
        replace(plan.device_of(stage), local_index=0, ordinal=0) for stage in plan.stages
    )
    layers = tuple((stage.first_layer, stage.end_layer, stage.bits) for stage in plan.stages)
    return devices, layers, plan.micro_batching


def rows_of(folder: Path) -> list[Row]:
    """Return the distinct plans of a cluster that have run."""
    found = []
    for first, methods in distinct(folder).items():
        runs = {}
        for file in sorted(folder.glob(f"run__{first}__*.json")):
            runs[int(file.stem.rpartition("__")[2])] = json.loads(file.read_text())
        seconds = {
            turn: run["latency_s"]["measured"] for turn, run in runs.items() if "failed" not in run
        }
        if runs:
            found.append(
                Row(
                    methods=tuple(methods),
                    plan=read_plan(folder / f"plan__{first}.json"),
                    seconds=seconds,
                    failures=len(runs) - len(seconds),
                )
            )
    return found


def counterpart(row: Row, rows: Sequence[Row]) -> Row | None:
    """Return our plan that loses no more quality than a row, the one forecast to be fastest."""
    able = [one for one in rows if one.is_ours and one.quality <= row.quality + 2 * SAME_QUALITY]
    return min(able, key=lambda one: one.predicted_s, default=None)


def close_ones(folder: Path) -> list[str]:
    """Return the plans that are worth another run: ours, and rivals nearly as fast at a quality."""
    rows = [row for row in rows_of(folder) if row.seconds]
    wanted = {OURS}
    for row in rows:
        own = counterpart(row, rows)
        if own is not None and row.rivals and row.median_s <= CLOSE * own.median_s:
            wanted |= {row.methods[0], own.methods[0]}
    return [name for name in distinct(folder) if name in wanted]


def verdict(row: Row, own: Row) -> str:
    """Say how ours fares against a rival's plan."""
    if row is own:
        return "same plan"
    if min(own.seconds.values()) > max(row.seconds.values()):
        return "slower"
    if max(own.seconds.values()) < min(row.seconds.values()):
        return "faster"
    return "equal within noise"


def ratio(row: Row, own: Row) -> float:
    """Return how many times as long a plan takes as ours: the median over the turns of both."""
    turns = row.seconds.keys() & own.seconds.keys()
    return statistics.median(row.seconds[turn] / own.seconds[turn] for turn in turns)


def span(values: Sequence[float], unit: str = "") -> str:
    """Return the median, with the least and the largest where there are several."""
    text = f"{statistics.median(values):.2f}{unit}"
    return f"{text} ({min(values):.2f}-{max(values):.2f})" if len(values) > 1 else text


def tell_plans(found: dict[str, list[Row]]) -> None:
    """Print every plan with its forecast and its runs."""
    heads = ("cluster", "plan by", "bits", "quality lost", "layers", "predicted",
             "measured, runs", "error", "x llmpq", "x llmpq of its quality")  # fmt: skip
    print(f"| {' | '.join(heads)} |")
    print("| --- " * len(heads) + "|")
    for name, rows in found.items():
        for row in rows:
            plan = row.plan
            layers = "+".join(str(stage.num_layers) for stage in plan.stages)
            cells = [name, ", ".join(row.methods), f"{statistics.mean(plan.bits):.1f}"]
            cells += [f"{row.quality:.3g}", layers, f"{row.predicted_s:.2f} s"]
            if not row.seconds:
                print(f"| {' | '.join(cells)} | failed | | | |")
                continue
            own = counterpart(row, [one for one in rows if one.seconds])
            seconds = tuple(row.seconds.values())
            cells += [f"{span(seconds, ' s')}, {len(seconds)}"]
            cells += [f"{row.predicted_s / row.median_s - 1:+.0%}"]
            cells += [f"{ratio(row, rows[0]):.2f}" if rows[0].seconds else ""]
            cells += [f"{ratio(row, own):.2f}, {verdict(row, own)}" if own and row.rivals else ""]
            print(f"| {' | '.join(cells)} |")


def tell_gains(found: dict[str, list[Row]]) -> None:
    """Print geometric means by rival: against the plan asked for, and at the rival's quality."""
    print("\n| rival | clusters | as planned | at its quality | ours is |")
    print("| --- | --- | --- | --- | --- |")
    for method in METHODS[1:]:
        planned, equal, verdicts = [], [], Counter[str]()
        for every in found.values():
            rows = [row for row in every if row.seconds]
            for row in rows:
                own = counterpart(row, rows)
                if method in row.methods and own is not None:
                    planned.append(ratio(row, rows[0]))
                    equal.append(ratio(row, own))
                    verdicts[verdict(row, own)] += 1
        if planned:
            told = ", ".join(f"{word} {count}x" for word, count in verdicts.most_common())
            print(f"| {method} | {len(planned)} | {mean_of(planned)} | {mean_of(equal)} | {told} |")
    rows = [row for every in found.values() for row in every if row.seconds]
    errors = [abs(row.predicted_s / row.median_s - 1) for row in rows]
    if errors:
        print(f"\nforecasts of {len(rows)} plans: mean error {statistics.mean(errors):.1%}, "
              f"largest {max(errors):.1%}; failed runs: {failures(found)}")  # fmt: skip


def failures(found: dict[str, list[Row]]) -> int:
    """Return the number of runs that came to no end."""
    return sum(row.failures for rows in found.values() for row in rows)


def mean_of(ratios: Sequence[float]) -> str:
    """Return the geometric mean with the span."""
    mean = math.exp(statistics.mean(map(math.log, ratios)))
    return f"{mean:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


OWN_COLOUR, OTHER_COLOUR, RANGE_COLOUR = BIT_COLOURS[16], "#b8c4cc", CAPACITY_COLOUR


def draw(picture: Path, found: dict[str, list[Row]]) -> None:
    """Draw measured against predicted latency of every plan, a panel a cluster."""
    from matplotlib.patches import Patch  # noqa: PLC0415  only for the picture

    lines = -(-len(found) // 2)
    with new_figure(picture, 12, 2.9 * lines) as figure:
        panels = figure.subplots(lines, 2, squeeze=False)
        for panel in panels.flat[len(found) :]:
            panel.axis("off")
        for panel, (name, rows) in zip(panels.flat, found.items(), strict=False):
            own = [row for row in rows if row.seconds][::-1]
            places = range(len(own))
            low = [row.median_s - min(row.seconds.values()) for row in own]
            high = [max(row.seconds.values()) - row.median_s for row in own]
            panel.barh(
                places, [row.median_s for row in own], xerr=[low, high],
                error_kw={"elinewidth": 1, "ecolor": RANGE_COLOUR},
                color=[OWN_COLOUR if row.is_ours else OTHER_COLOUR for row in own],
            )  # fmt: skip
            panel.scatter([row.predicted_s for row in own], places, color=INK, marker="|", s=120,
                          label="predicted", zorder=3)  # fmt: skip
            for place, row in zip(places, own, strict=True):
                right = max(row.predicted_s, *row.seconds.values())  # beyond every mark of the row
                words = f"{row.median_s:.2f} s"
                panel.annotate(
                    words,
                    (right, place),
                    (6, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=7,
                )
            panel.set_yticks(places, [label_of(row) for row in own], fontsize=7)
            panel.set_title(name.replace("bit s", "bit/s"))
            panel.margins(x=0.18)
            panel.set_xlabel("seconds")
        colours = {
            "planned by llmpq": OWN_COLOUR,
            "other planners": OTHER_COLOUR,
            "range of runs": RANGE_COLOUR,
        }
        marks, names = panels.flat[0].get_legend_handles_labels()
        patches = [Patch(color=colour, label=label) for label, colour in colours.items()]
        figure.legend(
            [*patches, *marks], [*colours, *names], fontsize=8, ncols=4, loc="outside lower center"
        )


def label_of(row: Row) -> str:
    """Return a short name with the mean bits."""
    more = " ..." if row.methods[2:] else ""
    return f"{', '.join(row.methods[:2])}{more} ({statistics.mean(row.plan.bits):.1f} bit)"


def main() -> int:
    """Tell what a folder of runs holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    found = {}
    for file in sorted(options.folder.glob("*/cluster.json")):
        rows = rows_of(file.parent)
        if rows:
            name = json.loads(file.read_text())["name"]
            found[" ".join(name.replace("-", " ").split())] = rows
    tell_plans(found)
    tell_gains(found)
    if options.picture is not None:
        draw(options.picture, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
