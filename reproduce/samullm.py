"""SamuLLM's evaluation (Sec. 5) by the estimate, on eight A100-80G from the authors' tables.

    python -m reproduce.samullm --data FOLDER [--small] [--keep FILE] [--json]

FOLDER holds ``iterations/<model>_tp<degree>.csv.gz``, ``model_load_seconds.json`` and
``output_length_pdf_norobots.json``, as made from github.com/puddingfjz/vllm (Apache-2.0). Every
application is planned with one sample of answer lengths and played with another. With ``--keep`` a
later start goes on where this one was stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmpq.errors import LlmpqError
from llmpq.multillm.candidates import resolve_models
from llmpq.multillm.engine.law import IterationModel
from llmpq.multillm.graph import load_application
from llmpq.multillm.planner import Method, PlanOptions, plan_application
from llmpq.multillm.planner.application import (
    PlannedApplication,
    candidate_finder,
    replay,
    workload_of,
)
from llmpq.multillm.requests import load_items
from llmpq.spec.cluster import load_cluster
from llmpq.spec.fields import dump_json, write_text
from reproduce.output import Record, emit, say, table
from reproduce.samullm_cases import Cases

PLANNED, PLAYED = 0, 1
"""Seeds of the lengths that are planned with, and played."""
METHODS: tuple[Method, ...] = ("greedy", "samullm", "max", "min")
NAMES = {"greedy": "ours", "samullm": "Algorithm 1", "max": "Max", "min": "Min"}


Published = tuple[str, str]
"""Gains of Algorithm 1, end to end, over Max and over Min."""
ENSEMBLE, ROUTING = ("1.1-2.4", "1.0-1.6"), ("1.4-1.8", "1.0-1.1")
CHAIN, MIXED = ("1.0-1.3", "1.0-1.4"), ("1.2-1.4", "1.2-1.4")
RIVALS: tuple[Method, ...] = ("max", "min")


@dataclass(frozen=True, slots=True)
class Case:
    """An application with what the paper publishes about it.

    Attributes:
        name: for the tables.
        make: writes the application that is planned.
        published: gains.
        truth: writes the application whose lengths are played; the same by default.
    """

    name: str
    make: Callable[[Cases], Path]
    published: Published
    truth: Callable[[Cases], Path] | None = None


def _ensemble(requests: int, limit: int) -> Case:
    return Case(
        f"ensemble, {requests:,} requests, limit {limit}",
        lambda cases: cases.ensemble(requests, limit),
        ENSEMBLE,
    )


def _chain(documents: int, evaluations: int) -> Case:
    return Case(
        f"chain, {documents} documents, {evaluations} evaluations",
        lambda cases: cases.chain(documents, evaluations),
        CHAIN,
    )


MIXED_DOCUMENTS, MIXED_REQUESTS, EVALUATIONS = (100, 300, 500), 5000, 4


def _mixed(documents: int, limit: int) -> Case:
    return Case(
        f"mixed, {documents} documents, {MIXED_REQUESTS:,} requests of limit {limit}",
        lambda cases: cases.mixed(documents, MIXED_REQUESTS, limit, EVALUATIONS),
        MIXED,
    )


def _known(cases: Cases) -> Path:
    return cases.routing(is_known=True)


SAMPLED = Case(
    "routing, lengths sampled", lambda cases: cases.routing(is_known=False), ROUTING, _known
)
KNOWN = Case("routing, distribution known", _known, ROUTING)
SMALL = (
    *(_ensemble(requests, 256) for requests in (1000, 10000)),
    SAMPLED,
    KNOWN,
    *(_chain(documents, 4) for documents in (100, 500)),
    _mixed(300, 256),
)
CASES = (
    *(_ensemble(requests, limit) for limit in (256, 512) for requests in (1000, 5000, 10000)),
    SAMPLED,
    KNOWN,
    *(_chain(*sizes) for sizes in ((100, 1), (100, 2), (100, 4), (300, 4), (500, 4))),
    *(_mixed(documents, 256) for documents in MIXED_DOCUMENTS),
)
ABLATIONS = tuple(_mixed(500, limit) for limit in (256, 512))
VARIANTS: dict[str, PlanOptions] = {
    "as planned": PlanOptions(pipelines=False),
    "no preemption": PlanOptions(pipelines=False, preemption=False),
    "lengths known": PlanOptions(pipelines=False, seed=PLAYED),
}
AS_PLANNED = next(iter(VARIANTS))
ABLATED: tuple[Method, ...] = ("greedy", "samullm", "min")


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, play and print the tables."""
    parser = argparse.ArgumentParser(prog="reproduce.samullm", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--small", action="store_true", help="some cases, without ablations")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds to improve a plan")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keeps the figures, case by case")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for machines")
    options = parser.parse_args(argv)
    try:
        record = collect(options.data, options.limit, options.keep, is_small=options.small)
    except LlmpqError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return error.exit_status
    emit(report(record), record, as_json=options.json)
    return 0


def collect(data: Path, limit_s: float, keep: Path | None, *, is_small: bool = False) -> Record:
    """Return the figures of all cases and ablations."""
    with tempfile.TemporaryDirectory() as folder:
        bench = _Bench(Cases(data, Path(folder)), limit_s, keep)
        record: Record = {"cases": [bench.compare(case) for case in (SMALL if is_small else CASES)]}
        if not is_small:
            record["ablations"] = {case.name: bench.ablations(case) for case in ABLATIONS}
    return record


class _Bench:
    """Plans and plays cases; ``keep`` names the file of the figures so far."""

    def __init__(self, cases: Cases, limit_s: float, keep: Path | None) -> None:
        self._cases, self._limit_s, self._keep = cases, limit_s, keep
        self._fitted: dict[str, IterationModel] = {}
        self._cluster = load_cluster(cases.cluster)
        has_kept = keep is not None and keep.exists()
        self._known: Record = json.loads(keep.read_text()) if keep and has_kept else {}

    def compare(self, case: Case) -> Record:
        """Return the figures of all methods."""
        found: Record = {"name": case.name, "published": case.published}
        return found | {method: self._figures(case, method, AS_PLANNED) for method in METHODS}

    def ablations(self, case: Case) -> Record:
        """Return the figures without preemption, and with known lengths."""
        return {
            method: {name: self._figures(case, method, name) for name in VARIANTS}
            for method in ABLATED
        }

    def _figures(self, case: Case, method: Method, variant: str) -> Record:
        key = f"{case.name}, {method}, {variant}, {self._limit_s:g} s"
        if key not in self._known:
            say(key)
            self._known[key] = self._played(case, replace(VARIANTS[variant], method=method))
            if self._keep is not None:
                write_text(self._keep, dump_json(self._known))
        found: Record = self._known[key]
        return found

    def _played(self, case: Case, options: PlanOptions) -> Record:
        path = case.make(self._cases)
        planned = self._plan(path, options)
        played = self._play(planned, path if case.truth is None else case.truth(self._cases))
        schedule = planned.schedule
        return {
            "predicted_s": schedule.makespan_s,
            "played_s": played,
            "search_s": schedule.search_s,
            "bound_s": schedule.bound_s,
            "idle_s": schedule.idle_s,
            "stages": len(schedule.stages),
        }

    def _plan(self, path: Path, options: PlanOptions) -> PlannedApplication:
        app = load_application(path)
        chosen = replace(options, limit_s=self._limit_s)
        return plan_application(app, load_items(app), self._cluster, chosen, fitted=self._fitted)

    def _play(self, planned: PlannedApplication, path: Path) -> float:
        app = load_application(path)
        models = resolve_models(app)
        workload = workload_of(app, load_items(app), models, PLAYED)
        finder = candidate_finder(models, self._cluster, workload, planned.problem.candidates)
        return replay(workload, planned.schedule, self._cluster, finder).makespan_s


def report(record: Record) -> str:
    """Return the tables as Markdown."""
    parts = [_gains(record["cases"]), _searches(record["cases"])]
    if "ablations" in record:
        parts.append(_apart(record["cases"]))
        parts.append(_ablations(record["ablations"]))
    return "\n\n".join(parts)


def _gains(cases: Sequence[Record]) -> str:
    rows = []
    for case in cases:
        seconds = {method: case[method]["played_s"] for method in METHODS}
        rows.append(
            [
                case["name"],
                *(f"{seconds[method]:.0f}" for method in METHODS),
                f"{seconds['samullm'] / seconds['greedy']:.2f}",
                *(f"{seconds[rival] / seconds['greedy']:.2f}" for rival in RIVALS),
                *(
                    cell
                    for rival, published in zip(RIVALS, case["published"], strict=True)
                    for cell in (f"{seconds[rival] / seconds['samullm']:.2f}", published)
                ),
            ]
        )
    head = (
        "application", *(f"{NAMES[method]}, s" for method in METHODS), "Algorithm 1 over ours",
        "Max over ours", "Min over ours", "Max over Algorithm 1", "published",
        "Min over Algorithm 1", "published ",
    )  # fmt: skip
    return f"### Seconds as played, and gains\n\n{table(head, rows)}"


def gain(case: Record, rival: Method) -> float:
    """Return the gain of Algorithm 1 over a rival, as it is shown."""
    return float(round(case[rival]["played_s"] / case["samullm"]["played_s"], 2))


def published(case: Record, rival: Method) -> tuple[float, float]:
    """Return the range of the published gains of Algorithm 1 over a rival."""
    low, high = case["published"][RIVALS.index(rival)].split("-")
    return float(low), float(high)


def _apart(cases: Sequence[Record]) -> str:
    """Return how much longer the parts of a mixed application take one after the other."""
    seconds = {case["name"]: case for case in cases}
    rows = []
    for documents in MIXED_DOCUMENTS:
        parts = _ensemble(MIXED_REQUESTS, 256).name, _chain(documents, EVALUATIONS).name
        whole = seconds[_mixed(documents, 256).name]
        sums = {
            method: sum(seconds[part][method]["played_s"] for part in parts) for method in METHODS
        }
        shares = (f"{sums[method] / whole[method]['played_s']:.2f}" for method in METHODS)
        rows.append([f"{documents} documents", *shares])
    head = ("mixed", *(NAMES[method] for method in METHODS))
    return f"### Parts one after the other, over mixed\n\n{table(head, rows)}"


def _searches(cases: Sequence[Record]) -> str:
    rows = []
    for case in cases:
        ours = case["greedy"]
        rows.append(
            [
                case["name"],
                *(f"{case[method]['search_s']:.1f}" for method in METHODS),
                f"{ours['predicted_s']:.0f}",
                f"{ours['bound_s']:.0f}",
                f"{1.0 - ours['bound_s'] / ours['predicted_s']:.0%}",
                f"{ours['played_s'] / ours['predicted_s'] - 1.0:+.1%}",
            ]
        )
    head = (
        "application", *(f"search of {NAMES[method]}, s" for method in METHODS),
        "ours predicted, s", "lower bound, s", "gap", "played over predicted",
    )  # fmt: skip
    return f"### Searches, bounds and estimates\n\n{table(head, rows)}"


def _ablations(cases: Record) -> str:
    rows = []
    for case, found in cases.items():
        ours = found["greedy"][AS_PLANNED]["played_s"]
        for method, variants in found.items():
            base = variants[AS_PLANNED]["played_s"]
            for name, figures in variants.items():
                rows.append(
                    [
                        case,
                        NAMES[method],
                        name,
                        f"{figures['played_s']:.0f}",
                        f"{figures['played_s'] / base:.2f}",
                        f"{figures['played_s'] / ours:.2f}",
                        f"{figures['played_s'] / figures['predicted_s'] - 1.0:+.1%}",
                    ]
                )
    head = (
        "application", "method", "variant", "played, s", "over as planned", "over ours",
        "played over predicted",
    )  # fmt: skip
    return f"### Ablations\n\n{table(head, rows)}"


if __name__ == "__main__":
    sys.exit(main())
