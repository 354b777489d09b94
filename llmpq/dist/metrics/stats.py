"""What a rank measures: busy time by phase, peak memory, and its time line.

The time line is for waits in the report, the live line and traces. Stages send their spans to the
master before their statistics, in the clock of rank 0. A trace opens in Perfetto or
``chrome://tracing``.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from llmpq.dist.metrics.measurement import (
    CoreTime,
    HeldBytes,
    StageStats,
    StartLog,
    StartStep,
    TakenShare,
    WorkSample,
    core_time,
)
from llmpq.dist.metrics.progress import Event, RunProgress
from llmpq.dist.transport.communicator import Communicator
from llmpq.dist.transport.frames import MAX_TEXT_BYTES, TENSOR_KINDS, Frame, FrameKind
from llmpq.errors import StageError
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
        read_host: returns the seconds in which threads of the host computed; ``None`` without any.
    """

    micro_batching: MicroBatching
    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    read_core: Callable[[int], CoreTime | None] = core_time
    load_s: float = 0.0
    read_host: Callable[[], float] | None = None
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
            host_busy_s=None if self.read_host is None else self.read_host(),
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

    Prompts cost their own tokens, and kernels of CPUs and CUDA read each row's own context, so the
    mean counts; in decode elsewhere every row is read to the end of the longest.
    """
    if phase is Phase.DECODE and device.type not in ("cpu", "cuda"):
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


class DeviceMarks:
    """Two marks in a GPU's queue of work, between which it measures the time itself.

    The host waits for neither: it reads the time once something behind them has been read.
    """

    def __init__(self) -> None:
        event: Any = torch.cuda.Event  # untyped
        self._first, self._last = event(enable_timing=True), event(enable_timing=True)
        self._first.record()

    @classmethod
    def of(cls, device: torch.device) -> DeviceMarks | None:
        """Put the first mark into the queue of a device, ``None`` where that is not possible."""
        return cls() if device.type == "cuda" else None

    def end(self) -> None:
        """Put the second mark into the queue."""
        self._last.record()

    def seconds(self) -> float:
        """Return the time between the marks; waits where the device has not reached them."""
        self._last.synchronize()
        return float(self._first.elapsed_time(self._last)) / 1000


MAX_EVENTS = 200_000
"""Most spans of a rank; the trace of a longer run ends there."""
LIVE_S = 0.5
"""Time between two reports of how busy a rank is."""
_LINK_WORDS = ("send", "wait")
_EVENTS_A_FRAME = 500
_US = 1e6


_Span = list[Any]
"""Name, start and length in microseconds of rank 0's clock, micro-batch or ``None``."""


class Recorder:
    """Keeps the spans of a rank if ``is_on``; on rank 0, those of all ranks.

    ``clock_offset_s`` is added to this rank's clock to get rank 0's. ``start`` has the steps of the
    rank's start so far.
    """

    def __init__(
        self,
        rank: int,
        *,
        is_on: bool,
        clock_offset_s: float = 0.0,
        start: StartLog | None = None,
    ) -> None:
        self.is_on = is_on
        self.start = start or StartLog(time.perf_counter())
        self._rank = rank
        self._offset_s = clock_offset_s
        self._spans: dict[int, list[_Span]] = {rank: []}  # by rank
        self._unnamed = 0  # index of the first own span whose micro-batch is not known yet
        self._current: int | None = None
        for step in self.start.steps:
            self._add_step(step)

    def mark(self, name: str, end_s: float | None = None) -> None:
        """End a step of the rank's start, now by default."""
        self._add_step(self.start.mark(name, end_s))

    def _add_step(self, step: StartStep) -> None:
        """Keep a step as a span that belongs to no micro-batch."""
        if self.is_on:
            span = self._span(step.name, step.begin_s, step.end_s, None)
            self._spans[self._rank].insert(self._unnamed, span)
            self._unnamed += 1

    def _span(self, name: str, start_s: float, end_s: float, number: int | None) -> _Span:
        start_us = round((start_s + self._offset_s) * _US)
        return [name, start_us, round((end_s - start_s) * _US), number]

    def add(self, name: str, start_s: float, end_s: float, micro_batch: int | None = None) -> None:
        """Keep a span, timed by ``time.perf_counter``."""
        spans = self._spans[self._rank]
        if self.is_on and len(spans) < MAX_EVENTS:
            number = self._current if micro_batch is None else micro_batch
            spans.append(self._span(name, start_s, end_s, number))

    def received(self, micro_batch: int) -> None:
        """Assign the following spans to this micro-batch."""
        self._current = micro_batch

    def sent(self, micro_batch: int) -> None:
        """Assign the spans since the last frame to this micro-batch."""
        spans = self._spans[self._rank]
        for span in spans[self._unnamed :]:
            if span[3] is None:
                span[3] = micro_batch
        self._unnamed = len(spans)
        self._current = None

    def trace_calls(self, thing: object, method: str, name: str, device: torch.device) -> None:
        """Keep a span of every call of ``thing.method``; does nothing without a trace."""
        if not self.is_on:
            return
        inner: Callable[..., Any] = getattr(thing, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            result = inner(*args, **kwargs)
            synchronize(device)
            if name == "embed":
                # A new micro-batch begins; its number is known when it is sent.
                self._current = None
            self.add(name, start_s, time.perf_counter())
            return result

        setattr(thing, method, timed)

    def frames(self) -> list[Frame]:
        """Return the frames that carry this rank's new spans to rank 0, and delete the spans."""
        spans, self._spans[self._rank], self._unnamed = self._spans[self._rank], [], 0
        parts = [spans[at : at + _EVENTS_A_FRAME] for at in range(0, len(spans), _EVENTS_A_FRAME)]
        texts = [json.dumps([self._rank, part]).encode() for part in parts]
        assert all(len(text) <= MAX_TEXT_BYTES for text in texts)
        return [Frame(kind=FrameKind.TRACE, text=text) for text in texts]

    def take(self, frame: Frame) -> None:
        """Keep the spans of another rank."""
        try:
            rank, rows = json.loads(frame.text)
            good = [
                [str(name), int(start), int(length), number] for name, start, length, number in rows
            ]
            self._spans.setdefault(int(rank), []).extend(good)
        except (ValueError, TypeError):
            raise StageError("found an unreadable trace, expected a stage's spans") from None

    def to_json(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the trace of all ranks, which have these names, in Chrome's format from time 0."""
        first = min((span[1] for spans in self._spans.values() for span in spans), default=0)
        events = [
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": name}}
            for rank, name in enumerate(names)
        ]
        events += [
            {"name": "thread_name", "ph": "M", "pid": rank, "tid": tid, "args": {"name": name}}
            for rank in range(len(names))
            for tid, name in enumerate(("work", "link"))
        ]
        events += [
            {
                "name": name,
                "ph": "X",
                "pid": rank,
                "tid": int(name in _LINK_WORDS),
                "ts": start - first,
                "dur": length,
                "args": {} if number is None else {"micro_batch": number},
            }
            for rank, spans in sorted(self._spans.items())
            for name, start, length, number in spans
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}


class RecordingCommunicator:
    """A communicator that times its calls, reports how busy its rank is, and sends the trace."""

    def __init__(
        self, inner: Communicator, recorder: Recorder, clock: StageClock, progress: RunProgress
    ) -> None:
        self.rank = inner.rank
        self.names = inner.names
        self.ranks = inner.ranks
        self._inner = inner
        self._recorder = recorder
        self._clock = clock
        self._progress = progress
        self._begin_s: float | None = None
        self._reported_s = 0.0

    def send(self, frame: Frame) -> None:
        """Send a frame; send this rank's spans before its statistics."""
        if frame.kind is FrameKind.STATS and self._recorder.is_on:
            for part in self._recorder.frames():
                self._inner.send(part)
        if frame.kind not in TENSOR_KINDS:
            self._inner.send(frame)
            return
        start_s = time.perf_counter()
        self._inner.send(frame)
        end_s = time.perf_counter()
        if self._begin_s is None:
            self._begin_s = start_s
        self._clock.send_s += end_s - start_s
        self._recorder.add("send", start_s, end_s, frame.micro_batch)
        self._recorder.sent(frame.micro_batch)
        self._report_busy(end_s)

    def has_frame(self) -> bool:
        """Return whether ``recv`` would return or raise at once."""
        return self._inner.has_frame()

    def await_frame(self, longest_s: float) -> bool:
        """Wait until ``recv`` would return or raise at once; return whether it would."""
        return self._inner.await_frame(longest_s)

    def recv(self) -> Frame:
        """Receive a frame; the wait for the first micro-batch does not count."""
        start_s = time.perf_counter()
        frame = self._inner.recv()
        end_s = time.perf_counter()
        while frame.kind is FrameKind.TRACE and self.rank == 0:
            self._recorder.take(frame)
            frame = self._inner.recv()
        if frame.kind in TENSOR_KINDS:
            if self._begin_s is None:
                self._begin_s = end_s
            else:
                self._clock.wait_s += end_s - start_s
                self._recorder.add("wait", start_s, end_s, frame.micro_batch)
            self._recorder.received(frame.micro_batch)
        return frame

    def close(self) -> None:
        """Finish sending and close the connections."""
        self._inner.close()

    def _report_busy(self, now_s: float) -> None:
        if now_s - self._reported_s < LIVE_S or self._begin_s is None:
            return
        self._reported_s = now_s
        elapsed_s = now_s - self._begin_s
        busy_s = elapsed_s - self._clock.wait_s - self._clock.send_s
        event = Event(
            rank=self.rank, kind="busy", done=round(1000 * busy_s), total=round(1000 * elapsed_s)
        )
        self._progress.report(event)
