"""The report of a run: what was predicted against what was measured.

Memory is the total of a plan's parts against the most the process held (``stats.peak_memory_bytes``
says what that includes). ``prefill_s`` and ``decode_s`` are seconds of one full micro-batch on one
stage, ``*_busy_s`` those of all micro-batches of a phase. Latency runs from the first micro-batch
to the last token, without loading. Predicted seconds are a forecast of the requests that ran, not
of the plan's workload; ``None`` without one. ``per_request`` holds mean and
percentiles over the requests: latency from arrival, service from the start of the prompt, time to
the first token and between tokens. ``start_s`` holds the seconds from the command to the first
token, and those of each step of rank 0. ``llmpq-profile recalibrate`` corrects tables by ``work``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmpq.batching import BatchingPolicy, summarise
from llmpq.batching.drift import Drift, DriftMonitor
from llmpq.dist.metrics.measurement import Measurement, StageStats, busy_text, is_busy, seconds_of
from llmpq.logging import get_logger
from llmpq.spec.fields import dump_json, to_json, write_text
from llmpq.spec.huggingface.quantization import find_config
from llmpq.spec.plan import Plan, PlanForecast, Schedule, StageForecast, draft_bytes
from llmpq.spec.precision import Phase
from llmpq.spec.workload import empirical
from llmpq.units import format_bytes, format_number, format_seconds

logger = get_logger(__name__)


def build_report(
    plan: Plan, measurement: Measurement, forecast: PlanForecast | None = None
) -> dict[str, Any]:
    """Return the object that ``llmpq-dist --json`` prints.

    Args:
        plan: the plan that ran.
        measurement: of the run.
        forecast: of the requests that ran, ``None`` without one.
    """
    latency_s, prefill_s = measurement.latency_s, measurement.prefill_s
    tokens = measurement.generated_tokens
    report: dict[str, Any] = {
        "status": "stopped" if measurement.not_served else "done",
        "requests": measurement.requests,
        "generated_tokens": tokens,
        "elapsed_s": latency_s,
        "load_s": measurement.load_s,
        "throughput_tokens_per_s": tokens / latency_s if latency_s > 0 else 0.0,
        "policy": measurement.policy,
        "per_request": summarise(measurement.records),
        "latency_s": {"predicted": forecast and forecast.latency_s, "measured": latency_s},
    }
    if prefill_s is not None:
        report["phases"] = {
            "prefill": {"predicted": forecast and forecast.prefill_s, "measured": prefill_s},
            "decode": {
                "predicted": forecast and forecast.decode_s,
                "measured": latency_s - prefill_s,
            },
        }
    if measurement.cached_tokens:
        report["prefix_cache"] = {
            "tokens": sum(record.prompt_tokens for record in measurement.records),
            "cached": measurement.cached_tokens,
        }
    if measurement.draft_tokens:
        report["drafts"] = {
            "tokens": measurement.draft_tokens,
            "accepted": measurement.accepted_tokens,
        }
    if measurement.draft is not None:
        report["draft_model"] = _draft_report(plan, measurement.draft)
    if measurement.start:
        steps = seconds_of(measurement.start)
        report["start_s"] = {"total": sum(steps.values()), **steps}
    report["stages"] = [
        _stage_report(
            plan, stats, latency_s, None if forecast is None else forecast.stages[stats.rank]
        )
        for stats in measurement.stages
    ]
    if measurement.restarts or measurement.not_served or measurement.refused:
        report["faults"] = {
            "restarts": [asdict(restart) for restart in measurement.restarts],
            "answered_before": sum(restart.finished for restart in measurement.restarts),
            "not_served": measurement.not_served,
            "refused": list(measurement.refused),
        }
    return report


def format_report(report: dict[str, Any], *, verbose: bool = False) -> str:
    """Return the report as text for a person: a line, and what needs attention.

    Args:
        report: of :func:`build_report`.
        verbose: whether to add start, requests, phases and stages.
    """
    taken = {f"rank {stage['rank']}": stage.get("cpu_taken") for stage in report["stages"]}
    busy = any(is_busy(share) for share in taken.values())
    lines = [_summary_line(report, is_valid=not busy)]
    if "prefix_cache" in report:
        cache = report["prefix_cache"]
        lines.append(f"prefix cache: {cache['cached']} of {cache['tokens']} prompt tokens")
    if "drafts" in report:
        drafts = report["drafts"]
        lines.append(f"drafts: {drafts['tokens']} tokens, {drafts['accepted']} accepted")
    if "faults" in report:
        lines += _fault_lines(report["faults"])
    if busy:
        lines.append(f"{busy_text(taken)}; predicted and measured seconds are not comparable")
    if verbose:
        lines += _detail_lines(report, is_valid=not busy)
    return "\n".join(lines)


def _summary_line(report: dict[str, Any], *, is_valid: bool) -> str:
    """Return what ran, how fast, and the forecast of the same requests."""
    latency, requests = report["latency_s"], report["requests"]
    parts = [
        f"{requests:,} request{'' if requests == 1 else 's'}",
        f"{report['generated_tokens']:,} tokens in {format_seconds(report['elapsed_s'])}",
        f"{format_number(report['throughput_tokens_per_s'])} tokens/s",
    ]
    if latency["predicted"] is not None and requests:
        error = _error(latency, is_valid)
        parts.append(f"forecast {format_seconds(latency['predicted'])}")
        parts += [] if error == "-" else [error]
    return ", ".join(parts)


def _detail_lines(report: dict[str, Any], *, is_valid: bool) -> list[str]:
    lines = [f"loaded in {format_seconds(report['load_s'])}"]
    if "start_s" in report:
        total_s, *steps = report["start_s"].items()
        parts = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in steps)
        lines.append(f"first token after {format_seconds(total_s[1])}: {parts}")
    if report["per_request"]:
        latency = report["per_request"]["latency_s"]
        first = report["per_request"]["time_to_first_token_s"]
        lines.append(
            f"policy {report['policy']}: a request took {format_seconds(latency['mean'])} "
            f"(99 %: {format_seconds(latency['p99'])}), "
            f"its first token {format_seconds(first['mean'])}"
        )
    if "draft_model" in report:
        memory = report["draft_model"]["memory_bytes"]
        lines.append(
            f"draft model on {report['draft_model']['device']}: memory predicted "
            f"{format_bytes(memory['predicted'])}, measured {format_bytes(memory['measured'])}"
        )
    head = ("rank", "device", "memory", "measured", "prefill", "measured", "decode", "measured")
    lines += _columns(
        [(*head, "busy", "waiting"), *(_table_row(stage) for stage in report["stages"])]
    )
    if "phases" in report and report["latency_s"]["predicted"] is not None:
        lines += ["", *_columns(_phase_rows(report, is_valid=is_valid))]
    return lines


def _fault_lines(faults: dict[str, Any]) -> list[str]:
    lines = []
    if faults["restarts"]:
        lost_s = sum(restart["lost_s"] for restart in faults["restarts"])
        lines.append(
            f"started anew {len(faults['restarts'])} times after {format_seconds(lost_s)} in all "
            f"and {faults['answered_before']} answers; figures are those of the last start"
        )
    if faults["not_served"]:
        lines.append(f"stopped: {faults['not_served']} requests not served")
    if faults["refused"]:
        lines.append(f"refused: {len(faults['refused'])} prompts that could not be served")
    return lines


def _phase_rows(report: dict[str, Any], *, is_valid: bool) -> Sequence[tuple[str, ...]]:
    """Return the comparison phase by phase: of the whole run, then every stage's busy time.

    Errors are left out where it is not valid.
    """
    rows = [("", "prefill", "measured", "error", "decode", "measured", "error")]
    everything = [("all", *(report["phases"][phase.value] for phase in Phase))]
    everything += [
        (f"stage {stage['rank']} busy", stage["prefill_busy_s"], stage["decode_busy_s"])
        for stage in report["stages"]
        if "prefill_busy_s" in stage
    ]
    for name, prefill, decode in everything:
        rows.append((name, *_compared(prefill, is_valid), *_compared(decode, is_valid)))
    return rows


def _compared(pair: dict[str, float], is_valid: bool) -> tuple[str, str, str]:
    predicted, measured = pair["predicted"], pair["measured"]
    return format_seconds(predicted), format_seconds(measured), _error(pair, is_valid)


def _error(pair: dict[str, float], is_valid: bool) -> str:
    """Return by how much a prediction is above what was measured."""
    predicted, measured = pair["predicted"], pair["measured"]
    return f"{predicted / measured - 1:+.0%}" if is_valid and measured > 0 else "-"


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def memory_parts(plan: Plan, stats: StageStats) -> dict[str, dict[str, int]]:
    """Return the parts of a stage's memory that can be counted, and its peak while it loaded."""
    held, predicted = stats.held, plan.estimate.stages[stats.rank].memory
    if held is None:
        return {}
    parts = {
        "weights": {"predicted": predicted.weights, "measured": held.weights},
        "kv": {"predicted": predicted.kv, "measured": held.kv},
        "master": {"predicted": predicted.master, "measured": held.master},
        "buffers": {"measured": held.buffers},
        "loading_peak": {"measured": held.load_peak},
    }
    if held.host:
        parts["host"] = {"measured": held.host}
    for name in ("reserved", "device_used"):
        measured = getattr(stats, f"{name}_bytes")
        if measured is not None:
            parts[name] = {"measured": measured}
    return parts


def _stage_report(
    plan: Plan, stats: StageStats, latency_s: float, forecast: StageForecast | None
) -> dict[str, Any]:
    estimate = plan.estimate.stages[stats.rank]
    parts = memory_parts(plan, stats)
    stage = plan.stages[stats.rank]
    # Off rank 0 it is in a process of its own.
    drafting_bytes = 0 if stats.rank else draft_bytes(plan.draft, stage.device)
    found = {
        "rank": stats.rank,
        "device": plan.device_of(stage).label,
        "memory_bytes": {
            "predicted": estimate.memory.total + drafting_bytes,
            "measured": stats.memory_bytes,
        },
        **({"memory_parts": parts} if parts else {}),
        "prefill_s": {"predicted": forecast and forecast.prefill_s, "measured": stats.prefill_s},
        "decode_s": {"predicted": forecast and forecast.decode_s, "measured": stats.decode_s},
    }
    if stats.work and forecast is not None:
        for phase, busy_s in (
            (Phase.PREFILL, forecast.prefill_busy_s),
            (Phase.DECODE, forecast.decode_busy_s),
        ):
            pair = {"predicted": busy_s, "measured": stats.busy_in(phase)}
            found[f"{phase.value}_busy_s"] = pair
    if stats.work:
        found["work"] = [to_json(one) for one in stats.work]
    if stats.cpu_taken is not None:
        found["cpu_taken"] = stats.cpu_taken
    if stats.host_busy_s is not None:
        found["host_busy_s"] = stats.host_busy_s
    share = 1.0 / latency_s if latency_s > 0 else 0.0
    busy = min(1.0, stats.busy_s * share)
    return found | {
        "busy_fraction": busy,
        "wait_fraction": min(1.0, stats.wait_s * share),
        "send_fraction": min(1.0, stats.send_s * share),
        "bubble_fraction": 1.0 - busy if share else 0.0,
    }


def _draft_report(plan: Plan, stats: StageStats) -> dict[str, Any]:
    """Return the memory and the time of a draft model in a process of its own."""
    assert plan.draft is not None
    found: dict[str, Any] = {
        "rank": stats.rank,
        "device": plan.cluster.devices[plan.rank_devices[stats.rank]].label,
        "memory_bytes": {"predicted": plan.draft.memory_bytes, "measured": stats.memory_bytes},
        "busy_s": stats.busy_s,
    }
    return found if stats.held is None else found | {"held_bytes": asdict(stats.held)}


def _table_row(stage: dict[str, Any]) -> tuple[str, ...]:
    cells = [str(stage["rank"]), stage["device"]]
    for name, show in (
        ("memory_bytes", format_bytes),
        ("prefill_s", format_seconds),
        ("decode_s", format_seconds),
    ):
        pair = stage[name]
        cells += ["-" if value is None else show(value) for value in pair.values()]
    return (*cells, f"{stage['busy_fraction']:.0%}", f"{stage['wait_fraction']:.0%}")


def drift_monitor(
    schedule: Schedule, policy: BatchingPolicy, *, replans: bool, lengths: Path | None
) -> DriftMonitor | None:
    """Return the monitor of a run's answers, ``None`` if the schedule does not depend on lengths.

    Drift is logged, and the lengths so far are written to the file ``lengths``.
    """

    def on_drift(drift: Drift) -> None:
        assert monitor is not None
        logger.info("drift: %s", drift.text(replans=replans, lengths=lengths))
        if lengths is not None:
            write_lengths(lengths, monitor.observed)

    monitor = DriftMonitor.of(schedule, policy, replans=replans, on_drift=on_drift)
    return monitor


def write_lengths(file: Path, new_tokens: Sequence[int]) -> None:
    """Write lengths as ``llmpq-algo --lengths`` and ``llmpq-sim --lengths`` read them."""
    write_text(file, dump_json(to_json(empirical(new_tokens))))


def quantizer_of(model_dir: Path) -> str:
    """Return ``rtn``, or the method that a GPTQ checkpoint names.

    GPTQ-format files of llmpq name the method in ``meta``: rounded weights are ``rtn``.

    Raises:
        SpecError: ``config.json`` cannot be read.
    """
    found = find_config(model_dir)
    if found is None or found.get("quant_method") != "gptq":
        return "rtn"  # weights of other formats are decoded, and rounded like plain ones
    meta: Any = found.get("meta")
    method = meta.get("method") if isinstance(meta, dict) else None
    return str(method or found.get("quant_method"))
