"""The fault matrix: faults of clusters, played on real runs, with the outcome that is required.

    scripts/fault_matrix [--only kill stop ...] [--repeats 1] [--soak_s 1800] [--output FILE.jsonl]

Every case becomes one line of the output as soon as it is done; a second call goes on where the
first one stopped. Progress goes to standard error, the table to standard output. Exit status 1 when
a goal was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import bench
import deaths
import soak

import inputs

Case = Callable[[], dict[str, Any]]
PLANNER_LIMITS_S = (0.02, 0.3)
"""Less than the planner needs to begin, and less than it needs to prove."""

KINDS = ("plan", "cluster", "workload", "prompts", "table", "model")
WHAT = {
    "kill": "a rank is killed: typed error naming it",
    "stop": f"a rank is stopped (timeout {deaths.STEP_TIMEOUT_S:g} s): typed error naming it",
    "launcher": "the launcher is killed: nothing stays",
    "restart": "kills at random tokens: back serving, same tokens, once",
    "drain": "SIGTERM: what has begun is finished; twice: it ends",
    "prompts": "bad prompts hurt only themselves",
    "files": "damaged files: typed errors only",
    "frames": "damaged frame headers: none accepted",
    "soak": "soak",
    "time_limit": "the planner's time is up: a plan, flagged",
    "sockets": "listening sockets",
    "secrecy": "prompt text in output, files open to others",
}


def main(argv: Sequence[str]) -> int:
    """Run what is missing of the matrix and print the table."""
    parser = argparse.ArgumentParser(
        prog="scripts/fault_matrix", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--only", nargs="+", choices=list(WHAT), default=list(WHAT))
    parser.add_argument("--repeats", type=int, default=1, help="of every kill and stop")
    parser.add_argument("--kills", type=int, default=50, help="at random tokens, ten a run")
    parser.add_argument("--files", type=int, default=100_000, help="damaged ones, of all kinds")
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--soak_s", type=float, default=1800.0)
    parser.add_argument("--soak_requests", type=int, default=10_000, help="at least")
    parser.add_argument("--kill_every_s", type=float, default=60.0)
    parser.add_argument("--output", type=Path, default=Path("runs/faults.jsonl"))
    options = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["LLMPQ_STORE"] = "off"
    options.output.parent.mkdir(parents=True, exist_ok=True)
    done = read(options.output)
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        cases = cases_of(options, Path(name))
        left = [key for key in cases if key not in done]
        for number, key in enumerate(left, start=1):
            start_s = time.monotonic()
            try:
                outcome = cases[key]()
            except Exception as error:  # a case that cannot be played is a goal not shown
                outcome = {"ok": False, "error": f"{type(error).__name__}: {error}"}
            done[key] = {"case": key, "took_s": time.monotonic() - start_s, **outcome}
            with options.output.open("a", encoding="utf-8") as file:
                file.write(bench.as_json(done[key]) + "\n")
            verdict = "ok" if outcome["ok"] else "MISSED"
            print(f"{number}/{len(left)} {key}: {verdict} {brief(outcome)}", file=sys.stderr)
    chosen = [one for key, one in done.items() if key in cases]
    print(table(chosen))
    return int(not all(one["ok"] for one in chosen))


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return what earlier calls did, by case; cut-off lines and misses are done again."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            one = json.loads(line)
        except ValueError:
            continue
        if one["ok"]:
            found[one["case"]] = one
    return found


def cases_of(options: argparse.Namespace, folder: Path) -> dict[str, Case]:
    """Return every case by its name, in the order they are played."""

    @cache
    def expected(count: int, new_tokens: int) -> bench.Answers:
        prompts = bench.prompts_of(count, new_tokens)
        return bench.execute(folder, deaths.STAGES, prompts).answers

    found: dict[str, Case] = {}
    for repeat in range(options.repeats):
        found |= deadly(folder, repeat)
    for first in range(0, options.kills, 10):
        count = min(10, options.kills - first)
        found[f"restart kills {first + 1} to {first + count}"] = partial(
            lambda seed, number: deaths.recover(
                folder, seed, number, expected(deaths.RECOVER_REQUESTS, deaths.RECOVER_TOKENS)
            ),
            first,
            count,
        )
    found["prompts"] = lambda: inputs.bad_requests(folder, expected(30, inputs.BAD_TOKENS))
    found |= fuzzed(folder, options)
    for transport in ("auto", "gloo"):
        found[f"sockets {transport}"] = partial(soak.sockets, folder, transport)
    found["secrecy"] = partial(soak.traces, folder)
    found[f"soak {options.soak_s:g} s"] = partial(
        soak.soak, folder, options.soak_s, options.soak_requests, options.kill_every_s
    )
    return {key: case for key, case in found.items() if key.split()[0] in options.only}


def deadly(folder: Path, repeat: int) -> dict[str, Case]:
    """Return one repeat of every kill, stop and drain."""
    found: dict[str, Case] = {}
    for group, number in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)):
        for phase in deaths.PHASES:
            for stage in range(deaths.STAGES):
                key = f"{group} {phase} stage {stage} #{repeat}"
                found[key] = partial(deaths.strike, folder, number, stage, phase)
    for phase in ("loading", "decode"):
        found[f"launcher {phase} #{repeat}"] = partial(deaths.orphan, folder, phase)
    found[f"drain once #{repeat}"] = partial(deaths.drain, folder, False)
    found[f"drain twice #{repeat}"] = partial(deaths.drain, folder, True)
    return found


def fuzzed(folder: Path, options: argparse.Namespace) -> dict[str, Case]:
    """Return the damaged files and frames, and the planner without time."""
    found: dict[str, Case] = {}
    for seed, kind in enumerate(KINDS):
        share = -(-options.files // len(KINDS))
        found[f"files {kind} {share}"] = partial(inputs.files, folder, kind, share, seed)
    found[f"frames {options.frames}"] = partial(inputs.frames, options.frames, 0)
    for solver in ("exact", "highs"):
        for limit_s in PLANNER_LIMITS_S:
            key = f"time_limit {solver} {limit_s:g} s"
            found[key] = partial(inputs.planner, folder, solver, limit_s)
    return found


def brief(outcome: dict[str, Any]) -> str:
    """Return the figures of a case on one line."""
    hidden = ("ok", "limit_s") if outcome["ok"] else ("limit_s",)
    shown = {name: value for name, value in outcome.items() if name not in hidden}
    rounded = {n: round(v, 3) if isinstance(v, float) else v for n, v in shown.items()}
    return bench.as_json(rounded)


def table(done: list[dict[str, Any]]) -> str:
    """Return a row a goal."""
    lines = ["| goal | what | cases | met | median s | worst s | limit s |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for goal, what in WHAT.items():
        ours = [one for one in done if one["case"].split()[0] == goal]
        if not ours:
            continue
        seconds = sorted(one["seconds"] for one in ours if one.get("seconds") is not None)
        figures = (
            [f"{seconds[len(seconds) // 2]:.2f}", f"{seconds[-1]:.2f}"] if seconds else ["", ""]
        )
        limits = {one["limit_s"] for one in ours if "limit_s" in one}
        figures.append(" / ".join(f"{limit:g}" for limit in sorted(limits)))
        met = sum(one["ok"] for one in ours)
        lines.append(f"| {goal} | {what} | {len(ours)} | {met} | {' | '.join(figures)} |")
    health = sorted(one["health_s"] for one in done if one.get("health_s") is not None)
    if health:
        lines.append(
            f"| health | the health file says so | {len(health)} | "
            f"| {health[len(health) // 2]:.2f} "
            f"| {health[-1]:.2f} | 2 after a kill, timeout + 2 after a stop |"
        )
    return "\n".join(lines)
