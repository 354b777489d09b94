"""Applications of several models for real: estimate and measurement; Max and Min beside ours.

    python benchmarks/applications.py --folder DIR --json benchmarks/results/applications.json

Three random models share two devices, cores of this machine: one whole, the other held to an older
vector extension and to less memory than the largest model needs. ``llmpq-profile`` measures a layer
of each model on each device, short runs measure loading and how often the router chooses which
model. ``llmpq-apps plan`` plans five applications by three methods, ``llmpq-apps run`` runs them.
What is measured is kept in the folder: a later start goes on where this one was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from workbench import command, cpu_name, make_model

from llmpq.profiler.device import available_cores, cpu_isas

Json = dict[str, Any]

VOCABULARY, POSITIONS = 8000, 1024
SHAPES = {
    "small": {"layers": 8, "hidden": 512, "intermediate": 1408, "heads": 8, "kv_heads": 2},
    "middle": {"layers": 12, "hidden": 640, "intermediate": 1728, "heads": 10, "kv_heads": 2},
    "large": {"layers": 14, "hidden": 896, "intermediate": 2432, "heads": 14, "kv_heads": 2},
}
"""33, 65 and 134 million parameters."""
CLASSES = "xyz"
"""First letters of the words, by which a router's answer of one word chooses. Templates that ask a
model about one prompt begin with different words: no blocks of keys and values are shared."""
LETTERS = "abcdefghijklmnopqrstuvw0123456789ABCDEFGHIJKLMNOPQRSTUVW"
UNKNOWN = "<unk>"
OLD_MEMORY = 800_000_000
"""Bytes of the second device."""
METHODS = {"greedy": "ours", "max": "Max", "min": "Min"}
LIMITS = {"max_batch": 32, "max_prompt": 256, "max_context": 640, "max_prefill": 512, "points": 8}
PLANNING_S = 4.0
"""Seconds that ours may improve a schedule."""
TRIAL_SHARE_OF = "route"
TRIAL_METHODS = ("max", "min")
TRIAL_QUESTIONS = 150
TITLE = "Makespans of applications"


@dataclass(frozen=True, kw_only=True)
class File:
    """A file of requests.

    Attributes:
        count: lines.
        words: of a prompt, from and to.
        answer: most words of its answers, from and to.
        chunks: of a document, from and to; ``None``: one prompt.
    """

    count: int
    words: tuple[int, int]
    answer: tuple[int, int]
    chunks: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class App:
    """Files, nodes and edges of an application; edges of a router have the class they take."""

    files: Mapping[str, File]
    nodes: Sequence[Json]
    edges: Sequence[Json] = ()


def _node(name: str, model: str, longest: int, *templates: str, requests: str = "") -> Json:
    found: Json = {"name": name, "model": model, "max_new_tokens": longest}
    found |= {"requests": f"{requests}.jsonl"} if requests else {}
    return found | ({"templates": list(templates)} if templates else {})


def _edge(source: str, target: str, when: str | None = None) -> Json:
    return {"from": source, "to": target} | ({} if when is None else {"when": when})


def _questions(count: int) -> File:
    return File(count=count, words=(16, 64), answer=(24, 96))


DOCUMENTS = File(count=24, words=(64, 96), answer=(24, 64), chunks=(1, 6))
ROUTE = (
    _node("route", "small", 1, "xbb {prompt}", requests="questions"),
    _node("reply_x", "small", 96),
    _node("reply_y", "middle", 96),
    _node("reply_z", "large", 96),
)
ROUTES = tuple(_edge("route", f"reply_{letter}", letter) for letter in CLASSES)
CHAIN = (
    _node("summary", "middle", 64, "{prompt} {summary}", requests="documents"),
    _node("verdict", "large", 48, "xbb {summary}", "ybb {summary}"),
)
CHAINS = (_edge("summary", "summary"), _edge("summary", "verdict"))
APPS = {
    "ensemble": App(
        files={"questions": _questions(72)},
        nodes=[_node(f"by_{name}", name, 96, requests="questions") for name in SHAPES],
    ),
    "judged ensemble": App(
        files={"questions": _questions(72)},
        nodes=[
            _node("first", "small", 96, requests="questions"),
            _node("second", "middle", 96, requests="questions"),
            _node("judge", "large", 48, "{prompt} {first} {second}"),
        ],
        edges=[_edge("first", "judge"), _edge("second", "judge")],
    ),
    "router": App(files={"questions": _questions(144)}, nodes=ROUTE, edges=ROUTES),
    "chain": App(files={"documents": DOCUMENTS}, nodes=CHAIN, edges=CHAINS),
    "all three": App(
        files={"questions": _questions(72), "documents": DOCUMENTS},
        nodes=[
            *ROUTE,
            _node("opinion", "small", 96, "ybb {prompt}", requests="questions"),
            *CHAIN,
            _node("judge", "large", 48, "{opinion} {reply_x} {reply_y} {reply_z}"),
        ],
        edges=[
            *ROUTES, *CHAINS, _edge("opinion", "judge"),
            *(_edge(f"reply_{letter}", "judge") for letter in CLASSES),
        ],
    ),
}  # fmt: skip
TRIAL = App(
    files={
        "questions": _questions(TRIAL_QUESTIONS),
        "few": File(count=4, words=(16, 32), answer=(8, 8)),
    },
    nodes=[
        _node("route", "small", 1, "xbb {prompt}", requests="questions"),
        *(_node(f"by_{name}", name, 8, requests="few") for name in SHAPES if name != "small"),
    ],
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing; write and print the tables."""
    options = _parser().parse_args(argv)
    bench = Bench(options.folder.absolute(), options.scale, options.budget)
    bench.prepare()
    record = bench.run([name for name in APPS if name in options.only])
    result = {
        "topic": "applications",
        "command": f"python benchmarks/applications.py --folder DIR --budget {options.budget:g}"
        + ("" if options.scale == 1.0 else f" --scale {options.scale:g}"),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{cpu_name()}, {len(available_cores())} cores, load {os.getloadavg()[2]:.1f}",
        "versions": {name: version(name) for name in ("torch", "transformers")}
        | {"python": platform.python_version()},
        "tables": tables(record),
        "samples": [sample(one) for one in record],
    }
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    for table in result["tables"]:
        print(table["title"])
        for row in (table["columns"], *table["rows"]):
            print("  ".join(f"{value:>16}" for value in row))
        print(table["note"])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="models, tables and runs")
    parser.add_argument("--budget", type=float, default=15.0, help="seconds of a latency table")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of requests")
    parser.add_argument("--only", nargs="+", choices=APPS, default=list(APPS))
    parser.add_argument("--json", type=Path, help="result file to write")
    return parser


class Bench:
    """The steps of the benchmark; each keeps its results in the folder.

    Args:
        folder: for everything.
        scale: of the numbers of requests.
        budget_s: seconds of measuring one latency table.
    """

    def __init__(self, folder: Path, scale: float, budget_s: float) -> None:
        self._folder, self._scale, self._budget_s = folder, scale, budget_s
        isas = cpu_isas()
        self._isas = (None, isas[-2] if len(isas) > 1 else None)
        self._loads: Mapping[str, float] = {}
        self._shares: Mapping[str, float] = {}

    def prepare(self) -> None:
        """Write models and cluster; measure layers, loading and routing."""
        (self._folder / "models").mkdir(parents=True, exist_ok=True)
        for name, shape in SHAPES.items():
            path = self._folder / "models" / name
            sizes = {**shape, "vocab": VOCABULARY, "max_positions": POSITIONS}
            make_model(path, sizes, dtype="float32")  # older extensions have no bfloat16
            if not (path / "tokenizer.json").exists():
                write_tokenizer(path)
            self._measure_layers(name)
        (self._folder / "cluster.json").write_text(json.dumps(self._cluster()))
        self._loads, self._shares = self._trial()

    def run(self, names: Sequence[str]) -> list[Json]:
        """Return the reports of all methods for each of these applications."""
        found = []
        for name in names:
            folder = self._write(name, APPS[name])
            reports = {method: self._measured(folder, method) for method in METHODS}
            found.append({"application": name, "requests": requests_of(reports), **reports})
        return found

    def _measure_layers(self, model: str) -> None:
        """Measure a layer on both devices at once, as they will run."""

        def measure(number: int) -> None:
            table = self._folder / "tables" / str(number) / f"{model}.csv"
            if table.exists():
                return
            say(f"a layer of {model} on device {number}")
            table.parent.mkdir(parents=True, exist_ok=True)
            cores, isa = available_cores(), self._isas[number]
            limits = [word for key, value in LIMITS.items() for word in (f"--{key}", str(value))]
            command([
                "llmpq-profile", "layer", "--model", str(self._folder / "models" / model),
                "--core", str(cores[number % len(cores)]), "--bits", "16", "--resume",
                "--budget", str(self._budget_s), *limits,
                *(["--cpu_isa", isa] if isa else []), "--output", str(table),
            ])  # fmt: skip

        with ThreadPoolExecutor() as pool:
            list(pool.map(measure, range(len(self._isas))))

    def _cluster(self) -> Json:
        devices: list[Json] = []
        for number, isa in enumerate(self._isas):
            device: Json = {"type": "cpu", "count": 1, "threads": 1, "profile": f"tables/{number}"}
            device |= {"cpu_isa": isa} if isa else {}
            devices.append(device | ({"memory_bytes": OLD_MEMORY} if number else {}))
        nodes = [{"name": "here", "devices": devices}]
        return {"schema": 1, "name": "two-different-cores", "nodes": nodes, "links": []}

    def _trial(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return seconds to load each model, and shares of the router's classes.

        Loading begins when the model before is stopped: its end counts too.
        """
        folder = self._write("trial", TRIAL)
        loads: dict[str, list[float]] = {name: [] for name in SHAPES}
        for method in TRIAL_METHODS:
            for one in self._measured(folder, method)["replicas"]:
                if one["load_s"] is not None:
                    loads[one["model"]].append(one["load_s"] + one["end_s"] - one["stop_s"])
        answers = (folder / f"run-{TRIAL_METHODS[0]}" / "answers.jsonl").read_text().splitlines()
        return {name: statistics.mean(own) for name, own in loads.items()}, shares_of(answers)

    def _write(self, name: str, app: App) -> Path:
        """Write an application; return its folder."""
        folder = self._folder / name.replace(" ", "-")
        folder.mkdir(exist_ok=True)
        for file, wanted in app.files.items():
            count = max(2, round(self._scale * wanted.count))
            (folder / f"{file}.jsonl").write_text(request_lines(file, name, wanted, count))
        models = [
            {"name": own, "model": str(self._folder / "models" / own), "tables": self._load(own)}
            for own in SHAPES
            if any(node["model"] == own for node in app.nodes)
        ]
        edges = [edge | self._share(edge) for edge in app.edges]
        record = {"schema": 1, "name": folder.name, "models": models, "nodes": app.nodes}
        (folder / "app.json").write_text(json.dumps({**record, "edges": edges}))
        return folder

    def _load(self, model: str) -> list[Json]:
        return [{"load_s": self._loads[model]}] if model in self._loads else []

    def _share(self, edge: Json) -> Json:
        known = edge.get("when") in self._shares
        return {"share": self._shares[edge["when"]]} if known else {}

    def _measured(self, folder: Path, method: str) -> Json:
        """Plan and run by a method, once; return the report."""
        kept = folder / f"{method}.json"
        if not kept.exists():
            output = folder / f"run-{method}"
            shutil.rmtree(output, ignore_errors=True)  # a stopped run says nothing about time
            files = [str(folder / "app.json"), "--cluster", str(self._folder / "cluster.json")]
            files += ["--output", str(output), "--json"]
            search = ["--method", method, "--time_limit", str(PLANNING_S)]
            planned = json.loads(command(["llmpq-apps", "plan", *files, *search]))
            say(f"{folder.name} by {method}, {planned['makespan_s']['predicted']:.0f} s predicted")
            words = ["--schedule", str(output / "schedule.json"), "--overflow", "skip"]
            report = json.loads(command(["llmpq-apps", "run", *files, *words]))
            report["bound_s"] = planned["bound_s"]
            kept.write_text(json.dumps(report))
        found: Json = json.loads(kept.read_text())
        return found


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of words of three letters, so that a token has four characters."""
    vocabulary = {word(number): number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": UNKNOWN}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer.save(str(folder / "tokenizer.json"))


def word(number: int) -> str:
    """Return the word of a token; its first letter is its class."""
    if not number:
        return UNKNOWN
    rest, kind = divmod(number, len(CLASSES))
    high, low = divmod(rest, len(LETTERS))
    return CLASSES[kind] + LETTERS[high] + LETTERS[low]


def request_lines(file: str, seed: str, wanted: File, count: int) -> str:
    """Return random requests as JSON lines."""
    chance = random.Random(f"{seed} {file}")

    def text() -> str:
        return " ".join(
            word(chance.randrange(1, VOCABULARY)) for _ in range(chance.randint(*wanted.words))
        )

    lines = []
    for number in range(count):
        chunks = wanted.chunks and [text() for _ in range(chance.randint(*wanted.chunks))]
        line = {
            "id": f"{file}-{number}",
            "prompt": chunks or text(),
            "max_new_tokens": chance.randint(*wanted.answer),
        }
        lines.append(json.dumps(line) + "\n")
    return "".join(lines)


def shares_of(answers: Sequence[str]) -> dict[str, float]:
    """Return the share of each class among the router's answers, lines of an answer file."""
    found = [json.loads(line) for line in answers]
    texts = [one["text"] for one in found if one["node"] == TRIAL_SHARE_OF]
    counts = Counter(text[:1] for text in texts)
    return {letter: counts[letter] / len(texts) for letter in CLASSES}


def requests_of(reports: Mapping[str, Json]) -> int:
    """Return the answered requests, which all methods have in common."""
    counts = {method: sum(one["requests"].values()) for method, one in reports.items()}
    if len(set(counts.values())) > 1 or any(one["errors"] for one in reports.values()):
        raise SystemExit(f"found {counts} requests, expected all of them by every method")
    return next(iter(counts.values()))


def order_of(stages: Sequence[Json]) -> list[frozenset[tuple[str, tuple[str, ...]]]]:
    """Return which models ran on which devices, change after change."""
    found: list[frozenset[tuple[str, tuple[str, ...]]]] = []
    for stage in stages:
        own = frozenset((one["model"], tuple(one["devices"])) for one in stage["models"])
        if not found or found[-1] != own:
            found.append(own)
    return found


def sample(one: Json) -> Json:
    """Return what the result file keeps of the reports of an application."""
    wanted = ("makespan_s", "bound_s", "idle_s", "predicted_idle_s", "search_s", "generated_tokens")
    found = {"application": one["application"], "requests": one["requests"]}
    for method, name in METHODS.items():
        report = one[method]
        found[name] = {key: report[key] for key in wanted} | {
            "load_s": [round(own["load_s"], 2) for own in report["replicas"] if own["load_s"]],
            "planned": _shown(report["predicted_stages"]),
            "ran": _shown(report["stages"]),
        }
    return found


def _shown(stages: Sequence[Json]) -> list[str]:
    """Return stages as lines: until when, and which model had how many devices."""
    return [
        f"{stage['end_s']:.1f} s: "
        + ", ".join(f"{one['model']} {' '.join(one['devices'])}" for one in stage["models"])
        for stage in stages
    ]


def error_of(report: Json) -> float:
    """Return how much longer the estimate is than the run, relative to the run."""
    seconds = report["makespan_s"]
    return float(seconds["predicted"] / seconds["measured"] - 1.0)


def tables(record: Sequence[Json]) -> list[Json]:
    """Return the table of the reports of all applications."""
    rows, columns = [], ["application", "requests", "stages, order"]
    columns += [f"{name}, s (estimate)" for name in METHODS.values()]
    columns += [f"{METHODS[method]} over ours" for method in ("max", "min")]
    for one in record:
        ours = one["greedy"]
        is_kept = order_of(ours["stages"]) == order_of(ours["predicted_stages"])
        measured = {method: one[method]["makespan_s"]["measured"] for method in METHODS}
        rows.append([
            one["application"],
            str(one["requests"]),
            f"{len(ours['predicted_stages'])}, {'kept' if is_kept else 'repaired'}",
            *(f"{measured[method]:.1f} ({error_of(one[method]):+.1%})" for method in METHODS),
            *(f"{measured[method] / measured['greedy']:.2f}" for method in ("max", "min")),
        ])  # fmt: skip
    means = [
        f"{name} {statistics.mean(abs(error_of(one[method])) for one in record):.1%}"
        for method, name in METHODS.items()
    ]
    note = f"Estimates err in the mean by: {', '.join(means)}."
    return [{"title": TITLE, "columns": columns, "rows": rows, "note": note}]


def say(text: str) -> None:
    """Print what is measured to standard error."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
