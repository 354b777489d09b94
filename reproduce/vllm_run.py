"""A real vLLM run against the simulated one: iteration-level batching with chunked prefill.

    python -m reproduce.vllm_run FOLDER

FOLDER is LLMServingSim's data of Llama-3.1-8B on an RTX 4090 (MIT licence): measured microseconds
of every operator of a layer, a workload of 300 requests of ShareGPT's lengths at 10 a second, and
the times of a vLLM 0.19 run of it (2,048 tokens an iteration, 2,588 KV blocks of 16 tokens).
Nothing is fitted to the run. Attention of a mixed iteration is each prompt's own, and what the
decode steps add to a prompt of as many tokens in the table; times between points are interpolated.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import eq
from pathlib import Path
from statistics import fmean
from typing import Any

from llmpq.batching.engine_step import EngineLimits
from llmpq.batching.queue_order import queue_order
from llmpq.errors import LlmpqError, SpecError, bad_field
from llmpq.sim.costs import StepSize
from llmpq.sim.engine import simulate_engine
from llmpq.sim.report import SimReport
from llmpq.spec.workload import TraceRequest
from llmpq.units import US
from reproduce.output import Record, emit, table
from reproduce.worker_costs import WorkerCosts

LAYERS = 32
PER_LAYER = {"layernorm": 2, "qkv_proj": 1, "rotary_emb": 1, "o_proj": 1, "gate_up_proj": 1,
             "act_fn": 1, "down_proj": 1}  # fmt: skip
ONCE = ("embedding", "final_layernorm")
NULL_BLOCKS = 1
"""vLLM keeps a block of its own."""
HEAD = ("quantity", "vLLM, measured", "simulated", "error", "LLMServingSim", "its error")
FIGURES = {
    "first_token_s": "mean time to first token, s",
    "per_token_s": "mean time per token, ms",
    "makespan_s": "makespan, s",
}


class Line:
    """Values over one axis, straight between points and beyond the last.

    Args:
        points: value by place; a single one counts everywhere.
    """

    def __init__(self, points: dict[int, float]) -> None:
        self._places = sorted(points)
        self._values = [points[place] for place in self._places]

    def __call__(self, place: float) -> float:
        """Return the value at a place."""
        places, values = self._places, self._values
        if place <= places[0] or len(places) == 1:
            return values[0]
        upper = min(bisect_right(places, place), len(places) - 1)
        low, high = places[upper - 1], places[upper]
        share = (place - low) / (high - low)
        return values[upper - 1] + share * (values[upper] - values[upper - 1])


class Attention:
    """Microseconds of one layer's attention over prompts and decode steps, straight between points.

    Points with prompts, with decode steps and with both may lie on grids of their own, and places
    on one axis may depend on those before it: each axis is interpolated between the nearest places
    that have points.

    Args:
        points: by ``(prefill_chunk, kv_prefill, n_decode, kv_decode)``.

    Raises:
        SpecError: there are no points.
    """

    def __init__(self, points: dict[tuple[int, ...], float]) -> None:
        if not points:
            raise SpecError("attention profile: found no points, expected some")
        # 0 means that there is none of a phase: nothing lies between it and the first point.
        kinds: dict[tuple[bool, ...], dict[tuple[int, ...], float]] = {}
        for point, value in points.items():
            kinds.setdefault(_kind(point), {})[point] = value
        self._axes = {kind: _axes(found) for kind, found in kinds.items()}

    def prefill(self, chunk: float, before: float) -> float:
        """Return the time of one prompt's chunk behind ``before`` tokens of it."""
        return self._at((chunk, before, 0, 0))

    def decode(self, count: float, context: float) -> float:
        """Return the time of decode steps alone."""
        return self._at((0, 0, count, context))

    def added(self, chunk: float, before: float, count: float, context: float) -> float:
        """Return what decode steps add to a prompt's chunk."""
        return self._at((chunk, before, count, context)) - self.prefill(chunk, before)

    @lru_cache(maxsize=1 << 18)  # noqa: B019  one object a run
    def _at(self, place: tuple[float, ...]) -> float:
        wanted = _kind(place)
        alike = max(self._axes, key=lambda kind: sum(map(eq, kind, wanted)))
        return _value(self._axes[alike], place)


@dataclass(frozen=True, slots=True)
class _Axis:
    """Places on an axis in order, and what is at each of them: the next axis, or a value."""

    places: list[int]
    found: list[_Axis | float]

    def at(self, place: Sequence[float]) -> float:
        """Return the value at a place, that of the nearest point beyond the first and the last."""
        inside = min(max(place[0], self.places[0]), self.places[-1])
        upper = bisect_left(self.places, inside)
        high = _value(self.found[upper], place[1:])
        if self.places[upper] == inside:
            return high
        low = _value(self.found[upper - 1], place[1:])
        below, above = self.places[upper - 1], self.places[upper]
        return low + (inside - below) / (above - below) * (high - low)


def _value(found: _Axis | float, place: Sequence[float]) -> float:
    return found.at(place) if isinstance(found, _Axis) else found


def _axes(points: dict[tuple[int, ...], float]) -> _Axis | float:
    if () in points:
        return points[()]
    below: dict[int, dict[tuple[int, ...], float]] = {}
    for (first, *others), value in points.items():
        below.setdefault(first, {})[tuple(others)] = value
    return _Axis(sorted(below), [_axes(below[place]) for place in sorted(below)])


def _kind(place: Sequence[float]) -> tuple[bool, ...]:
    return tuple(value > 0 for value in place)


class Costs:
    """Seconds of an iteration.

    Args:
        folder: of the profile.
    """

    def __init__(self, folder: Path) -> None:
        dense = _lines(folder, "dense", "tokens")
        missing = [name for name in (*PER_LAYER, *ONCE) if name not in dense]
        if missing:
            raise bad_field(str(_file(folder, "dense")), "layer", sorted(dense), missing[0])
        self._dense = {name: Line(points) for name, points in dense.items()}
        ends = _lines(folder, "per_sequence", "sequences")
        self._ends = {name: Line(points) for name, points in ends.items()}
        keys = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
        rows = _rows(_file(folder, "attention"), *keys, "time_us")
        self._attention = Attention(
            {tuple(int(row[key]) for key in keys): float(row["time_us"]) for row in rows}
        )

    def __call__(self, shape: StepSize) -> float:
        """Return the seconds of one iteration."""
        layer_us = sum(count * self._dense[name](shape.tokens) for name, count in PER_LAYER.items())
        layer_us += self._attention_us(shape)
        once_us = sum(self._dense[name](shape.tokens) for name in ONCE)
        once_us += sum(line(shape.rows) for line in self._ends.values())
        return (LAYERS * layer_us + once_us) * US

    def _attention_us(self, shape: StepSize) -> float:
        rows = shape.decode_rows
        context = shape.decode_context / rows if rows else 0.0
        if not shape.prompts:
            return self._attention.decode(rows, context)
        total_us = sum(self._attention.prefill(count, first) for first, count in shape.prompts)
        if rows:
            tokens = sum(count for _, count in shape.prompts)
            before = sum(count * first for first, count in shape.prompts) / tokens
            total_us += self._attention.added(tokens, before, rows, context)
        return total_us


def main(argv: Sequence[str] | None = None) -> int:
    """Play the workload and print the table."""
    parser = argparse.ArgumentParser(prog="reproduce.vllm_run", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for machines")
    options = parser.parse_args(argv)
    try:
        record = collect(options.folder)
    except LlmpqError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return error.exit_status
    emit(report(record), record, as_json=options.json)
    return 0


def collect(folder: Path) -> Record:
    """Return the figures of the real run, of ours, and of LLMServingSim's own simulation."""
    bench = _one(folder, "bench_*")
    made = simulate_engine(
        WorkerCosts(Costs(folder)), limits_of(bench), queue_order("fcfs"), trace_of(folder)
    )
    return {
        "measured": measured(bench),
        "simulated": simulated(made),
        "theirs": theirs(bench),
        "iterations": made.steps,
        "preemptions": made.preemptions,
    }


def report(record: Record) -> str:
    """Return the table."""
    lines = []
    for key, title in FIGURES.items():
        real, ours, other = (record[who][key] for who in ("measured", "simulated", "theirs"))
        unit = 1e3 if key == "per_token_s" else 1.0
        lines.append([
            title, f"{real * unit:.2f}", f"{ours * unit:.2f}", f"{ours / real - 1:+.1%}",
            f"{other * unit:.2f}", f"{other / real - 1:+.1%}",
        ])  # fmt: skip
    tail = (
        f"{record['iterations']:,} iterations, {record['preemptions']} preemptions in simulation."
    )
    title = "## vLLM 0.19, Llama-3.1-8B on an RTX 4090"
    return f"{title}\n\n{table(HEAD, lines)}\n\n{tail}"


def trace_of(folder: Path) -> list[TraceRequest]:
    """Return the workload, from its first arrival on."""
    path = _one(folder, "workload_*.csv")
    rows = _rows(path, "arrival_time_ns", "input_toks", "output_toks")
    first = int(rows[0]["arrival_time_ns"])
    return [
        TraceRequest(
            arrival_s=(int(row["arrival_time_ns"]) - first) / 1e9,
            prompt_tokens=int(row["input_toks"]),
            new_tokens=int(row["output_toks"]),
        )
        for row in rows
    ]


def limits_of(bench: Path) -> EngineLimits:
    """Return what the real run was bounded by."""
    path = _one(bench, "meta.json")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SpecError(f"{path}: found no JSON: {error}") from None
    return EngineLimits(
        token_budget=_number(path, meta, "engine_kwargs", "max_num_batched_tokens"),
        max_sequences=_number(path, meta, "engine_kwargs", "max_num_seqs"),
        num_blocks=_number(path, meta, "kv_cache", "num_gpu_blocks") - NULL_BLOCKS,
        block_size=_number(path, meta, "kv_cache", "block_size"),
        watermark=0.0,
    )


def _number(path: Path, meta: Any, *names: str) -> int:
    """Return a field within fields."""
    found = meta
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    if not isinstance(found, int):
        raise bad_field(str(path), ".".join(names), found, "a whole number")
    return found


def measured(bench: Path) -> dict[str, float]:
    """Return the real run's means; arrivals are put on the engine's clock by the first request."""
    path = _one(bench, "requests.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    first = rows[0]
    shift_s = first["queued_ts"] - first["arrival_time"]
    return {
        "first_token_s": fmean(
            row["first_token_ts"] - (row["arrival_time"] + shift_s) for row in rows
        ),
        "per_token_s": fmean(
            (row["last_token_ts"] - row["first_token_ts"]) / (row["output_toks"] - 1)
            for row in rows
            if row["output_toks"] > 1
        ),
        "makespan_s": max(row["last_token_ts"] for row in rows) - first["queued_ts"],
    }


def simulated(made: SimReport) -> dict[str, float]:
    """Return our means."""
    return {
        "first_token_s": fmean(one.first_token_s - one.arrival_s for one in made.requests),
        "per_token_s": fmean(
            (one.end_s - one.first_token_s) / (one.new_tokens - 1)
            for one in made.requests
            if one.new_tokens > 1
        ),
        "makespan_s": made.makespan_s,
    }


def theirs(bench: Path) -> dict[str, float]:
    """Return what LLMServingSim simulated."""
    path = _one(bench, "their_simulation.csv")
    rows = _rows(path, "arrival", "TTFT", "TPOT", "end_time")
    first = min(int(row["arrival"]) for row in rows)
    return {
        "first_token_s": fmean(int(row["TTFT"]) for row in rows) / 1e9,
        "per_token_s": fmean(int(row["TPOT"]) for row in rows) / 1e9,
        "makespan_s": (max(int(row["end_time"]) for row in rows) - first) / 1e9,
    }


def _lines(folder: Path, what: str, axis: str) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for row in _rows(_file(folder, what), "layer", axis, "time_us"):
        found.setdefault(row["layer"], {})[int(row[axis])] = float(row["time_us"])
    return found


def _file(folder: Path, what: str) -> Path:
    return _one(folder, f"profile_*_{what}.csv")


def _one(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise SpecError(f"{folder}: found {len(found)} of '{pattern}', expected one")
    return found[0]


def _rows(path: Path, *columns: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file that has some columns and at least one row."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    missing = [name for name in columns if not rows or not rows[0].get(name)]
    if missing:
        raise bad_field(str(path), missing[0], list(rows[0]) if rows else None, "a column")
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
