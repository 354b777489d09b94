"""Measurements of a stage: busy time by phase, peak memory."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch

from llmpq.dist.metrics.core_time import CoreTime, TakenShare, core_time
from llmpq.dist.metrics.measurement import HeldBytes, StageStats, WorkSample
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import Phase
from llmpq.units import KIB

MAX_KINDS = 100
"""Most kinds of work in a rank's statistics, which fit one control frame."""
MAX_STEPS = 8_192
"""Steps of a phase that the medians are made of: the latest ones. A server never ends."""


class _Step(NamedTuple):
    phase: Phase
    rows: int
    seconds: float
    tokens: float
    master_s: float


@dataclass(slots=True, kw_only=True)
class StageClock:
    """Collects the busy times of one stage, and what :class:`StageStats` reports of it.

    Attributes:
        micro_batching: sizes of a full micro-batch.
        now, sleep: the clock, in seconds.
        read_core: returns the CPU time of a thread.
    """

    micro_batching: MicroBatching
    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    read_core: Callable[[int], CoreTime | None] = core_time
    load_s: float = 0.0
    held: HeldBytes | None = None
    wait_s: float = 0.0
    send_s: float = 0.0
    _busy_s: float = 0.0
    _taken: TakenShare | None = None
    _steps: dict[Phase, deque[_Step]] = field(
        default_factory=lambda: {phase: deque(maxlen=MAX_STEPS) for phase in Phase}
    )

    def record(
        self, phase: Phase, rows: int, seconds: float, tokens: float = 1, master_s: float = 0.0
    ) -> None:
        """Add the work on one micro-batch of so many rows and :func:`tokens_read`.

        ``seconds`` include ``master_s``, the master's own work. Called by the thread that computes:
        from the first call on, what others take of its CPU time is measured.
        """
        if self._taken is None:
            self._taken = TakenShare(self.read_core)
        self._busy_s += seconds
        self._steps[phase].append(_Step(phase, rows, seconds, tokens, master_s))

    def stats(self, rank: int, device: torch.device) -> StageStats:
        """Return the measurements so far."""
        return StageStats(
            rank=rank,
            load_s=self.load_s,
            busy_s=self._busy_s,
            prefill_s=self._median(Phase.PREFILL, self.micro_batching.prefill),
            decode_s=self._median(Phase.DECODE, self.micro_batching.decode),
            memory_bytes=peak_memory_bytes(device),
            reserved_bytes=_reserved_bytes(device),
            device_used_bytes=_device_used_bytes(device),
            held=self.held,
            wait_s=self.wait_s,
            send_s=self.send_s,
            work=self._longest_work(),
            cpu_taken=None if self._taken is None else self._taken.share(),
        )

    def _longest_work(self) -> tuple[WorkSample, ...]:
        """Return the kinds of work that took longest; ragged runs have too many to send."""
        kinds: defaultdict[tuple[Phase, int, int], list[_Step]] = defaultdict(list)
        for step in chain(*self._steps.values()):
            # Contexts grow by one a step: only their mean is kept.
            tokens = int(step.tokens) if step.phase is Phase.PREFILL else 0
            kinds[step.phase, step.rows, tokens].append(step)
        samples = [
            WorkSample(
                phase=phase,
                rows=rows,
                tokens=sum(step.tokens for step in steps) / len(steps),
                count=len(steps),
                seconds=sum(step.seconds - step.master_s for step in steps),
                master_s=sum(step.master_s for step in steps),
            )
            for (phase, rows, _), steps in kinds.items()
        ]
        return tuple(sorted(samples, key=lambda sample: -sample.seconds)[:MAX_KINDS])

    def _median(self, phase: Phase, full: int) -> float | None:
        steps = self._steps[phase]
        chosen = [step for step in steps if step.rows == full] or steps
        return statistics.median(step.seconds for step in chosen) if chosen else None


def tokens_read(phase: Phase, lengths: Sequence[int], device: torch.device) -> float:
    """Return the tokens of a row that a forecast charges a micro-batch of these lengths for.

    Prompts cost their own tokens and a CPU reads each row's own context, so the mean counts; in
    decode elsewhere every row is read to the end of the longest.
    """
    if phase is Phase.DECODE and device.type != "cpu":
        return max(lengths)
    return sum(lengths) / len(lengths)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process, in bytes.

    On a CPU: peak of the resident set, with the interpreter, the libraries and pages of files just
    read, as in a plan's ``runtime`` part. On CUDA and XPU: the most bytes that torch had allocated,
    without the driver's context; on MPS, which keeps no peak, those of now.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "xpu":
        return int(torch.xpu.max_memory_allocated(device))
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * KIB
    return 0


def _reserved_bytes(device: torch.device) -> int | None:
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def _device_used_bytes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def synchronize(device: torch.device) -> None:
    """Wait for a device's queued work, before the clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "xpu":
        torch.xpu.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
