"""The report of a run: what the plan predicted against what was measured.

Memory is the total of a plan's parts against the most the process held (``stats.peak_memory_bytes``
says what that includes). ``prefill_s`` and ``decode_s`` are seconds of one full micro-batch on one
stage. Latency runs from the first micro-batch sent off to the last token, loading apart; the
prediction is for a whole batch of full-length prompts, so other prompts explain a gap.
"""

from __future__ import annotations

from typing import Any

from llmpq.dist.measurement import Measurement, StageStats
from llmpq.spec.plan import Plan
from llmpq.units import format_bytes, format_seconds


def build_report(plan: Plan, measurement: Measurement) -> dict[str, Any]:
    """Return the object that ``llmpq-dist --json`` prints."""
    latency_s = measurement.latency_s
    tokens = measurement.generated_tokens
    return {
        "status": "done",
        "requests": measurement.requests,
        "generated_tokens": tokens,
        "elapsed_s": latency_s,
        "load_s": measurement.load_s,
        "throughput_tokens_per_s": tokens / latency_s if latency_s > 0 else 0.0,
        "latency_s": {"predicted": plan.estimate.latency_s, "measured": latency_s},
        "stages": [_stage_report(plan, stats, latency_s) for stats in measurement.stages],
    }


def format_report(plan: Plan, report: dict[str, Any]) -> str:
    """Return the report as a table for a person."""
    latency = report["latency_s"]
    lines = [
        f"{report['requests']} requests, {report['generated_tokens']} tokens in "
        f"{format_seconds(report['elapsed_s'])} "
        f"({report['throughput_tokens_per_s']:.1f} tokens/s), "
        f"loaded in {format_seconds(report['load_s'])}",
        f"latency: predicted {format_seconds(latency['predicted'])}, "
        f"measured {format_seconds(latency['measured'])}",
    ]
    if report["requests"] != plan.workload.batch:
        lines.append(
            f"(the prediction is for {plan.workload.batch} requests of "
            f"{plan.workload.prompt_tokens} + {plan.workload.new_tokens} tokens)"
        )
    head = ("rank", "device", "memory", "measured", "prefill", "measured", "decode", "measured")
    rows = [(*head, "busy"), *(_table_row(stage) for stage in report["stages"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join(lines)


def memory_parts(plan: Plan, stats: StageStats) -> dict[str, dict[str, int]]:
    """Return the parts of a stage's memory that can be counted, and its peak while it loaded.

    The plan's ``master`` part is larger than what is held by what only the master's steps take.
    """
    held, predicted = stats.held, plan.estimate.stages[stats.rank].memory
    if held is None:
        return {}
    return {
        "weights": {"predicted": predicted.weights, "measured": held.weights},
        "kv": {"predicted": predicted.kv, "measured": held.kv},
        "master": {"predicted": predicted.master, "measured": held.master},
        "buffers": {"measured": held.buffers},
        "loading_peak": {"measured": held.load_peak},
    }


def _stage_report(plan: Plan, stats: StageStats, latency_s: float) -> dict[str, Any]:
    estimate = plan.estimate.stages[stats.rank]
    parts = memory_parts(plan, stats)
    return {
        "rank": stats.rank,
        "device": plan.device_of(plan.stages[stats.rank]).label,
        "memory_bytes": {"predicted": estimate.memory.total, "measured": stats.memory_bytes},
        **({"memory_parts": parts} if parts else {}),
        "prefill_s": {"predicted": estimate.prefill_s, "measured": stats.prefill_s},
        "decode_s": {"predicted": estimate.decode_s, "measured": stats.decode_s},
        "busy_fraction": min(1.0, stats.busy_s / latency_s) if latency_s > 0 else 0.0,
    }


def _table_row(stage: dict[str, Any]) -> tuple[str, ...]:
    cells = [str(stage["rank"]), stage["device"]]
    for name, show in (
        ("memory_bytes", format_bytes),
        ("prefill_s", format_seconds),
        ("decode_s", format_seconds),
    ):
        pair = stage[name]
        cells += ["-" if value is None else show(value) for value in pair.values()]
    return (*cells, f"{stage['busy_fraction']:.0%}")
