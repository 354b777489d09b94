"""Measurement: what a run made and took. Ranks send it to the command as JSON. Needs no torch.

A rank also measures the share of its thread's CPU time that other programs took. Linux counts for
every thread how long it ran and how long it was ready to run while another thread had the core
(``/proc/PID/task/TID/schedstat``), and for every core what the hypervisor gave to other machines
(``steal`` in ``/proc/stat``).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from llmpq.batching import RequestRecord
from llmpq.spec.fields import Rule
from llmpq.spec.precision import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """Bytes of the tensors that a rank holds for the whole run.

    Attributes:
        weights: of the decoder layers, as their kernels store them.
        master: embeddings, final norm and head; 0 off rank 0.
        kv: key-value slots.
        buffers: shared by all steps, such as the one that 8-bit keys and values are widened into.
        load_peak: peak of the process (on CUDA: of its tensors) until all of these were loaded.
        host: experts in the memory of the device's host, which ``weights`` has not, and the buffers
            of the threads that compute them.
    """

    weights: int
    master: int
    kv: int
    buffers: int
    load_peak: int
    host: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSample:
    """Work of one kind that a rank did; forecasts are compared with it and corrected by it.

    Attributes:
        rows: sequences of the micro-batch.
        tokens: prompt length, or mean tokens that a decode step reads for a row: the row's own
            context on a CPU, elsewhere the longest one.
        count: micro-batches.
        seconds: all of them together, without the master's own work.
        master_s: the master's own work on them, 0 off rank 0.
    """

    phase: Phase
    rows: int
    tokens: float
    count: int
    seconds: float
    master_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStats:
    """The measurements of one rank.

    Attributes:
        load_s: reading, quantizing and placing its tensors.
        busy_s: all its work on micro-batches.
        prefill_s: median of a full prefill micro-batch (of any, when none was full); ``None`` when
            there was none. Includes the master's own work.
        decode_s: likewise for decode.
        memory_bytes: see ``llmpq.dist.metrics.stats.peak_memory_bytes``.
        reserved_bytes: on CUDA the most memory that torch took from the driver, with what its
            allocator and the pool of CUDA graphs hold unused; ``None`` elsewhere.
        device_used_bytes: on CUDA the memory of the GPU in use at the end, by all processes and the
            driver's contexts; ``None`` elsewhere.
        held: parts of it, ``None`` if not counted.
        work: its work by kind, longest first.
        wait_s: waiting for micro-batches, from its first one on.
        send_s: sending micro-batches to the next rank.
        cpu_taken: share of its thread's CPU time that other programs took, ``None`` if unknown.
        host_busy_s: in which threads of the host computed experts; ``None`` without such threads.
    """

    rank: int
    load_s: float
    busy_s: float
    prefill_s: float | None = None
    decode_s: float | None = None
    memory_bytes: int
    reserved_bytes: int | None = None
    device_used_bytes: int | None = None
    held: HeldBytes | None = None
    work: tuple[WorkSample, ...] = ()
    wait_s: float = 0.0
    send_s: float = 0.0
    cpu_taken: float | None = None
    host_busy_s: float | None = None

    def busy_in(self, phase: Phase) -> float:
        """Return the seconds of all micro-batches of a phase, the master's own work included."""
        return sum(one.seconds + one.master_s for one in self.work if one.phase is phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A restart of all ranks after one of them was lost.

    The ranks that ended had run for ``lost_s`` and had ``finished`` so many requests.
    """

    cause: str
    lost_s: float
    finished: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartStep:
    """What a rank did during a part of its start, in seconds of this host's monotonic clock."""

    name: str
    begin_s: float
    end_s: float


class StartLog:
    """The steps of a rank's start, one after the other, up to its first token.

    Args:
        begin_s: beginning of the first step.

    Attributes:
        steps: so far.
    """

    def __init__(self, begin_s: float) -> None:
        self.steps: list[StartStep] = []
        self._begin_s = begin_s

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each step by its name."""
        return seconds_of(self.steps)

    def mark(self, name: str, end_s: float | None = None) -> StartStep:
        """End a step, now by default; the next one begins."""
        end_s = time.perf_counter() if end_s is None else end_s
        step = StartStep(name=name, begin_s=self._begin_s, end_s=end_s)
        self.steps.append(step)
        self._begin_s = end_s
        return step


def seconds_of(steps: Sequence[StartStep]) -> dict[str, float]:
    """Return the seconds of each step by its name."""
    return {step.name: step.end_s - step.begin_s for step in steps}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Tokens of a run and the seconds of its phases, as measured.

    Attributes:
        requests: finished requests.
        generated_tokens: new tokens of all of them.
        latency_s: from the first dispatch to the last token.
        load_s: until every rank was ready.
        stages: measurements of every rank, in order.
        prefill_s: of ``latency_s``, until the last prompt's first token; ``None`` if not measured.
        policy: the batching policy of the run.
        records: arrival, start and end of each request.
        adjusted: decode iterations that RRA changed to during the run, in order.
        not_served: requests that had not begun when the run was asked to end.
        refused: for each prompt that could not be served, where it is and why.
        restarts: of the run, before the ranks that measured this.
        start: steps of rank 0, from the command to the first token.
        cached_tokens: of prompts that began as earlier ones, whose keys and values were found.
        draft_tokens: speculative decoding: draft tokens that were verified.
        accepted_tokens: those of them that became tokens of an answer.
        draft: measurements of the draft model's own rank; ``None`` without one, or if it ended
            early.
    """

    requests: int
    generated_tokens: int
    latency_s: float
    load_s: float
    stages: Annotated[tuple[StageStats, ...], Rule(minimum=1)]
    prefill_s: float | None = None
    policy: str = "hybrid"
    records: tuple[RequestRecord, ...] = ()
    adjusted: tuple[int, ...] = ()
    not_served: int = 0
    refused: tuple[str, ...] = ()
    restarts: tuple[Restart, ...] = ()
    start: tuple[StartStep, ...] = ()
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    draft: StageStats | None = None


BUSY_SHARE = 0.05
"""Share of a thread's time taken by others from which seconds are not comparable."""
PROVENANCE_KEY = "cpu_taken"
_TASKS = Path("/proc/self/task")
_STAT = Path("/proc/stat")
_STEAL = 7
"""Column of ``/proc/stat`` after the name of a core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreTime:
    """Seconds of a thread since it started.

    Attributes:
        ran_s: it ran.
        taken_s: it was ready to run, and another program or another machine had its core.
    """

    ran_s: float
    taken_s: float


def core_time(thread: int, tasks: Path = _TASKS, stat: Path = _STAT) -> CoreTime | None:
    """Return the times of a thread of this process, ``None`` where the kernel has none."""
    try:
        ran, taken, _ = (tasks / str(thread) / "schedstat").read_text(encoding="ascii").split()
        stolen_s = _stolen_s(stat, os.sched_getaffinity(thread))
    except (OSError, ValueError, AttributeError):
        return None
    return CoreTime(ran_s=int(ran) / 1e9, taken_s=int(taken) / 1e9 + stolen_s)


def _stolen_s(stat: Path, cores: set[int]) -> float:
    """Return the seconds that the hypervisor took, in the mean over the cores."""
    names = {f"cpu{core}" for core in cores}
    rows = [line.split() for line in stat.read_text(encoding="ascii").splitlines()]
    ticks = sum(int(row[1 + _STEAL]) for row in rows if row and row[0] in names)
    return ticks / os.sysconf("SC_CLK_TCK") / len(cores)


class TakenShare:
    """Measures, from its creation on, how much of the calling thread's time others take.

    Args:
        read: returns the times of a thread.
    """

    def __init__(self, read: Callable[[int], CoreTime | None] = core_time) -> None:
        self._read = read
        self._thread = threading.get_native_id()
        self._start = read(self._thread)

    def share(self) -> float | None:
        """Return the share so far of the time that the thread wanted, ``None`` if unknown."""
        end = self._read(self._thread)
        if self._start is None or end is None:
            return None
        ran_s, taken_s = end.ran_s - self._start.ran_s, end.taken_s - self._start.taken_s
        return taken_s / (ran_s + taken_s) if ran_s + taken_s > 0 else 0.0


def is_busy(share: float | None) -> bool:
    """Return whether others took so much that seconds are not comparable."""
    return share is not None and share >= BUSY_SHARE


def busy_text(shares: Mapping[str, float | None], when: str = "") -> str:
    """Return a message of what others took, by the name of a rank; a single one needs no name."""
    known = [f"{name} {share:.0%}".strip() for name, share in shares.items() if share is not None]
    return f"{f'CPU busy with other programs {when}'.strip()}: {', '.join(known) or 'unknown'}"


def provenance_line(share: float) -> tuple[str, str]:
    """Return the provenance line of a measured table."""
    return PROVENANCE_KEY, f"{share:.3f} of the timing thread's time, by other programs"


def share_in(provenance: Mapping[str, str]) -> float | None:
    """Return the share that a table's provenance states, ``None`` if it states none."""
    stated = provenance.get(PROVENANCE_KEY)
    return None if stated is None else float(stated.split()[0])
