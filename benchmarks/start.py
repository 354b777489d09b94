"""Time from a command to its first token with a warm store, and where it goes.

    python benchmarks/start.py --folder DIR --prepare     # model, plans, stores: nothing is timed
    python benchmarks/start.py --folder DIR --json benchmarks/results/start.json \
        --plot docs/images/start.png [--before CHECKOUT]

``llmpq-dist`` with one and with two stages, and ``llmpq-serve``, on a model of 594 M parameters at
4 bits whose quantized layers are in the store. The first token of ``llmpq-dist`` is there when the
answer of one token is written, that of ``llmpq-serve`` when the first request, sent once the server
is ready, is answered. Commands run in turn, round after round; with ``--before``, those of another
checkout in turn with those of this one. Byte code is cached, as it is after an installation.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from workbench import (
    PASSIVE,
    ROOT,
    SMALL_LLAMA,
    cluster_text,
    command,
    keep_document,
    machine,
    make_model,
)

from llmpq.cli.plots import BATCH_COLOURS, INK, new_figure

LLAMA = {**SMALL_LLAMA, "layers": 20, "hidden": 1536, "intermediate": 4096, "heads": 16}
"""594 M parameters."""
PROMPT = list(range(5, 21))
POLL_S = 0.002
TIMEOUT_S = 120.0
DIST, TWO_STAGES, SERVE = "llmpq-dist", "llmpq-dist, two stages", "llmpq-serve"
SEQUENCES = {1: 1, 2: 16}
"""Sequences of the workload for which a plan has so many stages."""
CASES = (DIST, TWO_STAGES, SERVE)
SIDES = ("before", "after")
COMMAND, ANSWER = "command", "answer"


@dataclass(frozen=True, kw_only=True)
class Span:
    """A step of a process, in seconds after the command."""

    process: str
    step: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start: seconds until the first token, and the steps of every process."""

    first_s: float
    spans: Sequence[Span]


Found = Mapping[str, Mapping[str, Sequence[Start]]]
"""Starts by case and checkout."""


def main() -> int:
    """Measure, and write figures and picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True, help="for the model and the plans")
    parser.add_argument("--prepare", action="store_true", help="make them, and time nothing")
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="draw the steps of the start")
    options = parser.parse_args()
    folder = options.folder.absolute()
    sides = {"after": ROOT}
    if options.before is not None:
        sides = {"before": options.before.absolute(), **sides}
    prepare(folder)
    for side, checkout in sides.items():
        for case in CASES:  # fills the stores, the page cache and the caches of byte code
            run(case, checkout, folder, side)
    if options.prepare:
        return 0
    load = os.getloadavg()[0]
    found: dict[str, dict[str, list[Start]]] = defaultdict(lambda: defaultdict(list))
    for number in range(options.rounds):
        for case in options.cases:
            for side in list(sides)[:: 1 if number % 2 else -1]:
                one = run(case, sides[side], folder, side)
                found[case][side].append(one)
                text = f"round {number + 1}: {case}, {side}: {one.first_s:.2f} s"
                print(text, file=sys.stderr, flush=True)
    document = record(found, options.rounds, load)
    if options.json is None:
        print(json.dumps(document, indent=1))
    else:
        keep_document(options.json, document)
    if options.plot is not None:
        draw(found, options.plot)
    return 0


def prepare(folder: Path) -> None:
    """Make the model, a prompt and the plans, once."""
    folder.mkdir(parents=True, exist_ok=True)
    make_model(folder / "model", LLAMA)
    for file in (ROOT / "models" / "demo").glob("tokenizer*"):
        shutil.copy(file, folder / "model")
    line = {"id": 0, "prompt_token_ids": PROMPT, "max_new_tokens": 1, "ignore_eos": True}
    (folder / "prompts.jsonl").write_text(json.dumps(line) + "\n")
    cores = len(os.sched_getaffinity(0))
    for stages in (1, 2):
        cluster = folder / f"cluster-{stages}.json"
        cluster.write_text(cluster_text(stages, max(1, cores // stages)))
        if not _plan(folder, stages).exists():
            command(["llmpq-algo", "--model", str(folder / "model"), "--cluster", str(cluster),
                     "--global_bz", str(SEQUENCES[stages]), "--s", "128", "--n", "64",
                     "--bits", "4", "--theta", "0", "--no_explain",
                     "--output", str(_plan(folder, stages))])  # fmt: skip
        found = len(json.loads(_plan(folder, stages).read_text())["stages"])
        if found != stages:
            raise SystemExit(f"{_plan(folder, stages)}: found {found} stages, expected {stages}")


def _plan(folder: Path, stages: int) -> Path:
    return folder / f"plan-{stages}.json"


def run(case: str, checkout: Path, folder: Path, side: str) -> Start:
    """Run a command of a checkout until its first token."""
    module = "serve" if case == SERVE else "dist"
    words = [sys.executable, "-P", "-m", f"llmpq.cli.commands.{module}", "--json"]
    words += ["--strat_file_name", str(_plan(folder, 2 if case == TWO_STAGES else 1))]
    words += ["--store", str(folder / f"store-{side}")]
    variables = {**os.environ, **PASSIVE, "PYTHONPATH": str(checkout)}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    variables.pop("OMP_NUM_THREADS", None)
    begin = start_serve if case == SERVE else start_dist
    return begin(words, folder, variables)


def start_dist(words: Sequence[str], folder: Path, variables: Mapping[str, str]) -> Start:
    """Answer the prompt with one token."""
    output, trace = folder / "answers.jsonl", folder / "trace.json"
    output.unlink(missing_ok=True)
    words = [*words, "--prompts", str(folder / "prompts.jsonl"), "--output", str(output)]
    begin_s = time.perf_counter()
    process = _started([*words, "--trace", str(trace)], folder, variables)
    while process.poll() is None and not (output.exists() and output.stat().st_size):
        time.sleep(POLL_S)
    first_s = time.perf_counter() - begin_s
    text, _ = process.communicate(timeout=TIMEOUT_S)
    if process.returncode:
        raise SystemExit(f"{words[3]}: status {process.returncode}")
    steps = json.loads(text)["start_s"]
    spans = [
        Span(
            process=COMMAND if event["name"] == COMMAND else f"rank {event['pid']}",
            step=event["name"],
            begin_s=event["ts"] / 1e6,
            end_s=(event["ts"] + event["dur"]) / 1e6,
        )
        for event in json.loads(trace.read_text())["traceEvents"]
        if event["ph"] == "X" and event["name"] in steps
        if event["name"] != COMMAND or event["pid"] == 0  # every rank has it
    ]
    return Start(first_s=first_s, spans=spans)


def start_serve(words: Sequence[str], folder: Path, variables: Mapping[str, str]) -> Start:
    """Start a server and ask for one token."""
    begin_s = time.perf_counter()
    process = _started([*words, "--port", "0"], folder, variables)
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or lines[-1].rstrip() != "}":
            lines.append(process.stdout.readline())
            if not lines[-1]:
                raise SystemExit(f"{words[3]}: ended, expected that it serves")
        ready_s = time.perf_counter() - begin_s
        found = json.loads("".join(lines))
        body = {"model": found["models"][0], "prompt": PROMPT, "max_tokens": 1}
        request = urllib.request.Request(
            f"{found['url']}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            answer.read()
        first_s = time.perf_counter() - begin_s
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=TIMEOUT_S)
    return Start(first_s=first_s, spans=_serve_spans(found, ready_s, first_s))


def _serve_spans(found: Mapping[str, Any], ready_s: float, first_s: float) -> list[Span]:
    """Return the steps of server, tokenizer and rank 0, from what the server says when ready."""
    own = dict(found.get("start_s", {}))
    if not own:  # an older checkout
        return []
    own.pop("total")
    launch_s, packages_s = own[COMMAND], own[COMMAND] + own["packages"]
    spans = _in_turn("server", own, 0.0)
    spans += _in_turn("tokenizer", {"tokenizer": found["tokenizer_s"]}, packages_s)
    spans += _in_turn("rank 0", found["rank_start_s"], launch_s)
    return [*spans, Span(process="server", step=ANSWER, begin_s=ready_s, end_s=first_s)]


def _in_turn(process: str, steps: Mapping[str, float], begin_s: float) -> list[Span]:
    spans = []
    for step, seconds in steps.items():
        spans.append(Span(process=process, step=step, begin_s=begin_s, end_s=begin_s + seconds))
        begin_s += seconds
    return spans


def _started(
    words: Sequence[str], folder: Path, variables: Mapping[str, str]
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        cwd=folder,
        env=dict(variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def record(found: Found, rounds: int, load: float) -> dict[str, Any]:
    """Return the document of the results."""
    sides = [side for side in SIDES if any(side in by_side for by_side in found.values())]
    totals = [
        [case, *(_cell([one.first_s for one in by_side[side]]) for side in sides)]
        for case, by_side in found.items()
    ]
    return {
        "topic": "start",
        "command": f"python benchmarks/start.py --folder DIR --rounds {rounds}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{machine()}, load {load:.1f} at the start",
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers")},
        },
        "tables": [
            {
                "title": "From the command to the first token, seconds",
                "columns": ["command", *(sides if len(sides) > 1 else ["seconds"])],
                "rows": totals,
                "note": "594 M parameters at 4 bits, 16 prompt tokens. Medians (least-most).",
            },
            {
                "title": "Steps until then on rank 0, seconds",
                "columns": ["step", *found],
                "rows": _step_rows(found),
            },
        ],
        "samples": {
            case: {side: [one.first_s for one in starts] for side, starts in by_side.items()}
            for case, by_side in found.items()
        },
    }


def _step_rows(found: Found) -> list[list[str]]:
    """Return the median of every step of rank 0, one column a case."""
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for case, by_side in found.items():
        for start in by_side["after"]:
            for span in start.spans:
                if span.process == "rank 0" or span.step in (COMMAND, ANSWER):
                    seconds[span.step][case].append(span.end_s - span.begin_s)
    return [
        [step, *(_cell(by_case[case]) if case in by_case else "-" for case in found)]
        for step, by_case in seconds.items()
    ]


def _cell(values: Sequence[float]) -> str:
    """Return median and range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def draw(found: Found, path: Path) -> None:
    """Draw the steps of every process of each command's median start."""
    from matplotlib.patches import Patch  # noqa: PLC0415  only for the picture

    typical = {
        case: sorted(by_side["after"], key=lambda one: one.first_s)[len(by_side["after"]) // 2]
        for case, by_side in found.items()
    }
    rows = {case: list(dict.fromkeys(s.process for s in typical[case].spans)) for case in typical}
    steps = list(dict.fromkeys(span.step for start in typical.values() for span in start.spans))
    colors = {step: f"C{number % len(BATCH_COLOURS)}" for number, step in enumerate(steps)}
    hatches = {
        step: "//" if number >= len(BATCH_COLOURS) else "" for number, step in enumerate(steps)
    }
    with new_figure(path, 9, 1.6 + 0.42 * sum(map(len, rows.values()))) as figure:
        panels = figure.subplots(
            len(typical), 1, sharex=True, squeeze=False,
            gridspec_kw={"height_ratios": [len(names) for names in rows.values()]},
        )[:, 0]  # fmt: skip
        for axes, (case, start) in zip(panels, typical.items(), strict=True):
            for span in start.spans:
                axes.barh(
                    rows[case].index(span.process),
                    span.end_s - span.begin_s,
                    left=span.begin_s,
                    color=colors[span.step],
                    hatch=hatches[span.step],
                    edgecolor="white",
                    linewidth=0.3,
                )
            axes.axvline(start.first_s, color=INK, linewidth=1)
            axes.set_yticks(range(len(rows[case])), rows[case])
            axes.invert_yaxis()
            axes.set_title(f"{case}: first token after {start.first_s:.2f} s")
        panels[-1].set_xlabel("seconds after the command")
        marks = [
            Patch(facecolor=colors[s], hatch=hatches[s], edgecolor="white", label=s) for s in steps
        ]
        figure.legend(handles=marks, loc="outside lower center", ncols=6, fontsize=8)


if __name__ == "__main__":
    sys.exit(main())
