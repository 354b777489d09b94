"""Doctor: check on every rank what a run needs, before anything is loaded.

All ranks connect as for a run, and each examines its own host and its link from the previous rank.
Rank 0 compares the results with its own and with the plan. A missing rank, an unusable address or a
different token is an error of the rendezvous, not a finding.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import llmpq
from llmpq.batching.blocks import slot_blocks
from llmpq.dist.launch.rank import torch_device
from llmpq.dist.metrics.control_groups import available_memory_bytes
from llmpq.dist.transport.channels import RankChannels
from llmpq.dist.transport.communicator import error_from_frame
from llmpq.dist.transport.errors import stage_name
from llmpq.dist.transport.frames import Frame, FrameKind, FrameLimits, Row
from llmpq.errors import LlmpqError, StageError
from llmpq.models import Checkpoint
from llmpq.spec.plan import Plan, draft_bytes
from llmpq.units import format_bytes

SMALL_FRAMES = 9
MIN_FRAMES, MAX_FRAMES, LARGE_BYTES = 4, 2000, 8 << 20
"""Prefill micro-batches to measure the bandwidth: at least so many bytes, within these counts."""
MAX_CLOCK_SKEW_S = 5.0
SLOW_LINK = 0.5
"""A link below this share of the cluster file's bandwidth is a warning."""
_Problem = tuple[dict[str, Any], str, str, str]
"""Facts of a rank, check, level, message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem of a rank; ``level`` is ``error`` if a run would fail, else ``warning``."""

    rank: int
    name: str
    check: str
    level: str
    message: str


def examine(plan: Plan, rank: int, model_dir: Path) -> dict[str, Any]:
    """Return facts about this rank's host as JSON; a failed check is an entry of ``failures``."""
    failures: dict[str, str] = {}
    facts: dict[str, Any] = {
        "rank": rank,
        "name": stage_name(plan, rank, socket.gethostname()),
        "versions": {
            "llmpq": llmpq.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "available_bytes": available_memory_bytes(),
        "cores": len(os.sched_getaffinity(0)),
        "wall_clock_s": time.time(),
        "perf_clock_s": time.perf_counter(),
        "failures": failures,
    }
    try:
        facts["weights_digest"] = Checkpoint(model_dir).digest()
    except (LlmpqError, OSError) as error:
        failures["weights"] = str(error)
    try:
        device = torch_device(plan, rank)
        if device.type == "cuda":
            facts["available_bytes"] = torch.cuda.mem_get_info(device)[0]
        facts["device"] = str(device)
    except LlmpqError as error:
        failures["device"] = str(error)
    return facts


def time_link(channels: RankChannels, limits: FrameLimits) -> dict[str, Any]:
    """Send frames to the next rank and time those of the previous one, on rank 0's clock."""
    communicator = channels.communicator
    assert communicator is not None  # only ranks with a ring are timed

    def now_us() -> int:
        return round((time.perf_counter() + channels.clock_offset_s) * 1e6)

    for _ in range(SMALL_FRAMES):
        communicator.send(Frame(kind=FrameKind.STATS, text=json.dumps(now_us()).encode()))
    delays = [now_us() - json.loads(_next(channels).text) for _ in range(SMALL_FRAMES)]
    rows = tuple(
        Row(
            blocks=slot_blocks(slot, limits.max_context, limits.prefill_tokens),
            window_blocks=(0,) * limits.blocks_of(limits.prefill_tokens) * (limits.num_tables - 1),
            first=0,
            length=limits.prefill_tokens,
        )
        for slot in range(limits.prefill_rows)
    )
    tokens = limits.prefill_rows * limits.prefill_tokens
    hidden = torch.zeros(1, tokens, limits.hidden_size, dtype=limits.dtype)
    count = min(MAX_FRAMES, max(MIN_FRAMES, 1 + LARGE_BYTES // hidden.nbytes))
    for number in range(count):
        communicator.send(
            Frame(kind=FrameKind.PREFILL, micro_batch=number, rows=rows, hidden=hidden)
        )
    arrivals = []
    for _ in range(count):
        _next(channels)
        arrivals.append(time.perf_counter())
    elapsed_s = max(arrivals[-1] - arrivals[0], 1e-9)
    return {
        "transport_to_next": channels.transport,
        "latency_s": max(0.0, statistics.median(delays) / 1e6),
        "latency_error_s": channels.clock_error_s,
        "bytes_per_s": (count - 1) * hidden.nbytes / elapsed_s,
    }


def gather(channels: RankChannels, facts: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return every rank's facts in order of rank on rank 0, ``None`` on the others."""
    communicator = channels.communicator
    assert communicator is not None
    text = json.dumps(facts).encode()
    size = len(communicator.names)
    if communicator.rank > 0:
        for _ in range(communicator.rank - 1):
            communicator.send(_next(channels))
        communicator.send(Frame(kind=FrameKind.STATS, text=text))
        return None
    others = [json.loads(_next(channels).text) for _ in range(size - 1)]
    return [facts, *sorted(others, key=lambda one: int(one["rank"]))]


def judge(plan: Plan, facts: Sequence[dict[str, Any]]) -> list[Finding]:
    """Compare the facts of all ranks with those of rank 0 and with the plan."""
    return [
        Finding(rank=one["rank"], name=one["name"], check=check, level=level, message=message)
        for one, check, level, message in (
            *(problem for one in facts for problem in _problems(plan, facts[0], one)),
            *_memory_problems(plan, facts),
        )
    ]


def report(plan: Plan, facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON object of ``llmpq-dist doctor --json``."""
    findings = judge(plan, facts)
    is_ready = not any(one.level == "error" for one in findings)
    return {
        "status": "ready" if is_ready else "not ready",
        "findings": [asdict(one) for one in findings],
        "ranks": list(facts),
    }


def _next(channels: RankChannels) -> Frame:
    assert channels.communicator is not None
    frame = channels.communicator.recv()
    if frame.kind is FrameKind.ERROR:
        raise error_from_frame(frame)
    if frame.kind not in (FrameKind.STATS, FrameKind.PREFILL):
        raise StageError(f"found a frame {frame.kind.name}, expected one of the doctor")
    return frame


def _problems(plan: Plan, first: dict[str, Any], one: dict[str, Any]) -> Iterator[_Problem]:
    """Yield the problems of one rank: what failed, and what differs from rank 0 or the plan."""
    for check, message in one["failures"].items():
        yield one, check, "error", message
    for package, version in one["versions"].items():
        expected = first["versions"][package]
        if version != expected:
            level = "error" if package == "llmpq" else "warning"
            message = f"{package}: found {version}, expected rank 0's {expected}"
            yield one, "versions", level, message
    digest, expected = one.get("weights_digest"), first.get("weights_digest")
    if digest is not None and expected is not None and digest != expected:
        message = f"found weights {digest[:12]}, expected rank 0's {expected[:12]}"
        yield one, "weights", "error", message
    skew_s = (one["wall_clock_s"] - one["perf_clock_s"] - one["clock_offset_s"]) - (
        first["wall_clock_s"] - first["perf_clock_s"]
    )
    if abs(skew_s) > MAX_CLOCK_SKEW_S:
        message = f"found a wall clock {skew_s:+.1f} s from rank 0's, expected the same time"
        yield one, "clocks", "warning", message
    if (link := one.get("link")) is None:
        return
    before, own = (plan.device_of(plan.stages[rank]) for rank in (one["rank"] - 1, one["rank"]))
    expected = plan.cluster.link(before, own).bytes_per_s
    if before.node != own.node and link["bytes_per_s"] < SLOW_LINK * expected:
        message = (
            f"found {format_bytes(link['bytes_per_s'])}/s from the rank before, expected "
            f"{format_bytes(expected)}/s as the cluster file says"
        )
        yield one, "links", "warning", message


def _memory_problems(plan: Plan, facts: Sequence[dict[str, Any]]) -> Iterator[_Problem]:
    """Compare the memory that the ranks of a device need together with what it has."""
    hosts: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in facts:
        node = plan.device_of(plan.stages[one["rank"]]).node
        hosts.setdefault((node, str(one.get("device", ""))), []).append(one)
    for ranks in hosts.values():
        needed = sum(
            plan.estimate.stages[one["rank"]].memory.total
            + draft_bytes(plan.draft, plan.stages[one["rank"]].device)
            for one in ranks
        )
        available = min(int(one["available_bytes"]) for one in ranks)
        if needed > available:
            message = (
                f"found {format_bytes(available)} available, expected {format_bytes(needed)} "
                f"for rank {', '.join(str(one['rank']) for one in ranks)}"
            )
            yield ranks[0], "memory", "error", message
