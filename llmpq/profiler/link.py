"""Time messages between two ranks, through the communicator that the runtime itself uses.

Round trips are timed: a frame of one size goes out and one of another size returns. Large out and
small back gives the bandwidth of one direction, small out and large back that of the other; the
smallest in both directions is twice the latency. A rank that reads its weights between messages
finds less in its caches, so the smallest frame is timed in that state too, and half of the
difference is added to every size. The processor time of send and receive is timed apart.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from llmpq import __version__
from llmpq.dist.transport.communicator import Communicator
from llmpq.dist.transport.frames import Frame, FrameKind, FrameLimits, Row
from llmpq.errors import SpecError, StageError
from llmpq.profiler.layer import spread_line, spread_of, warn_if_noisy
from llmpq.spec.tables import CommSample, CommTable, LinkEnds, ends_line

UNIT_BYTES = 512
"""Sizes are whole multiples of this: a frame of one row of tokens of 256 bfloat16 values."""
DEFAULT_SIZES = (UNIT_BYTES, 4096, 32_768, 262_144, 1_048_576, 4_194_304)
MIN_ROUNDS = 5
EVICTING_SIZE = 3584
"""Rows and columns of the matrix that is read in between: 49 MiB, more than most last caches."""
BUSY_AFTER = 0.5
"""Share by which rank 0 stays busy longer, so that the other end is done, and seldom asleep."""
ARRIVED_AFTER = 2.0
"""Multiple of an exchange after which the answer is taken to have arrived."""
_LEAST_S = 1e-9
_DTYPE = torch.bfloat16

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkJob:
    """What to measure between two nodes; the same on both ranks.

    The smallest of the ``sizes`` (bytes) is also the answer to the others; at least ``MIN_ROUNDS``
    rounds are made.
    """

    between: tuple[str, str]
    sizes: tuple[int, ...] = DEFAULT_SIZES
    budget_s: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        if len(set(self.sizes)) < 2 or any(size < 1 or size % UNIT_BYTES for size in self.sizes):
            raise SpecError(
                f"link sizes: found {list(self.sizes)}, expected at least two different "
                f"multiples of {UNIT_BYTES} bytes"
            )

    @property
    def exchanges(self) -> tuple[tuple[int, int], ...]:
        """Bytes out and bytes back of every kind of exchange."""
        small, *larger = sorted(set(self.sizes))
        return ((small, small), *((size, small) for size in larger), *((small, s) for s in larger))

    @property
    def limits(self) -> FrameLimits:
        """Limits of the frames of a measurement."""
        tokens = max(self.sizes) // UNIT_BYTES
        return FrameLimits(
            digest=b"linkprof",
            num_blocks=1,
            block_size=tokens,
            max_context=tokens,
            prefill_rows=1,
            prefill_tokens=tokens,
            decode_rows=1,
            hidden_size=UNIT_BYTES // _DTYPE.itemsize,
            dtype=_DTYPE,
        )


def measure_link(
    communicator: Communicator, job: LinkJob, progress: Progress | None = None
) -> CommTable | None:
    """Run one end of a link: rank 0 measures and returns the table, rank 1 answers.

    Logs a warning if the timings vary much.

    Raises:
        StageError: the other end is gone, or its answer is of another exchange.
        SpecError: there are not two ranks.
    """
    if len(communicator.names) != 2:
        raise SpecError(f"link: found {len(communicator.names)} ranks, expected 2")
    frames = {size: _hidden(size) for pair in job.exchanges for size in pair}
    evict = _CacheEviction()
    if communicator.rank != 0:
        _answer(communicator, job, frames, evict)
        return None
    times, cold, ends = _exchange_all(communicator, job, frames, evict, progress)
    communicator.send(Frame(kind=FrameKind.SHUTDOWN))
    communicator.recv()
    cold_s = max(0.0, (median(cold) - median(times[0])) / 2.0)
    noise = median(spread_of(values) for values in times)
    warn_if_noisy(noise)
    return CommTable(
        samples=_samples(job, times, cold_s),
        provenance=(*_provenance(job, times, cold_s, noise), ends_line(job.between, ends)),
    )


class _CacheEviction:
    """Reads more memory than caches hold, as a rank does between two messages."""

    def __init__(self) -> None:
        self._matrix = torch.ones(EVICTING_SIZE, EVICTING_SIZE)

    def __call__(self, after: float = 0.0) -> None:
        start = time.perf_counter()
        torch.mv(self._matrix, self._matrix[0])
        _spin(start + (1.0 + after) * (time.perf_counter() - start))


def _spin(end_s: float) -> None:
    while time.perf_counter() < end_s:
        pass


def _hidden(size: int) -> torch.Tensor:
    return torch.ones(1, size // UNIT_BYTES, UNIT_BYTES // _DTYPE.itemsize, dtype=_DTYPE)


def _frame(kind_of: int, hidden: torch.Tensor) -> Frame:
    row = Row(blocks=(0,), first=0, length=hidden.shape[1])
    return Frame(kind=FrameKind.PREFILL, micro_batch=kind_of, rows=(row,), hidden=hidden)


def _answer(
    communicator: Communicator, job: LinkJob, frames: dict[int, torch.Tensor], evict: _CacheEviction
) -> None:
    while True:
        frame = communicator.recv()
        if frame.kind is FrameKind.SHUTDOWN:
            communicator.send(frame)
            return
        if frame.micro_batch > len(job.exchanges):
            raise StageError(f"link: found exchange {frame.micro_batch}, expected another job")
        is_before_cold = frame.micro_batch == len(job.exchanges)
        _, back = job.exchanges[0 if is_before_cold else frame.micro_batch]
        communicator.send(_frame(frame.micro_batch, frames[back]))
        if is_before_cold:
            evict()


def _exchange_all(
    communicator: Communicator,
    job: LinkJob,
    frames: dict[int, torch.Tensor],
    evict: _CacheEviction,
    progress: Progress | None,
) -> tuple[list[list[float]], list[float], LinkEnds]:
    """Repeat every exchange in shuffled rounds; the first round is not counted.

    Returns the seconds of every exchange, those of the smallest with cold caches, and of the ends.
    """
    shuffle = random.Random(job.seed)
    times: list[list[float]] = [[] for _ in job.exchanges]
    cold: list[float] = []
    ends: list[tuple[float, float]] = []
    small = frames[min(job.sizes)]
    order = list(range(len(job.exchanges)))
    start = time.perf_counter()
    while len(times[0]) <= MIN_ROUNDS or time.perf_counter() - start < job.budget_s:
        shuffle.shuffle(order)
        for kind in order:
            times[kind].append(_exchange(communicator, kind, frames[job.exchanges[kind][0]]))
        _exchange(communicator, len(job.exchanges), small)
        evict(BUSY_AFTER)
        cold.append(_exchange(communicator, 0, small))
        _exchange(communicator, len(job.exchanges), small)
        ends.append(_time_ends(communicator, small, evict, ARRIVED_AFTER * cold[-1]))
        if progress is not None:
            share = min((time.perf_counter() - start) / job.budget_s, len(times[0]) / MIN_ROUNDS)
            progress(min(1.0, share))
    send_s, receive_s = (median(values) for values in zip(*ends[1:], strict=True))
    found = LinkEnds(send_s=send_s, receive_s=receive_s)
    return [values[1:] for values in times], cold[1:], found


def _time_ends(
    communicator: Communicator, hidden: torch.Tensor, evict: _CacheEviction, answered_s: float
) -> tuple[float, float]:
    """Return the seconds of a send, and of receiving an answer that has arrived already."""
    evict(BUSY_AFTER)
    start = time.perf_counter()
    communicator.send(_frame(0, hidden))
    send_s = time.perf_counter() - start
    _spin(start + answered_s)
    evict()
    start = time.perf_counter()
    communicator.recv()
    return send_s, time.perf_counter() - start


def _exchange(communicator: Communicator, kind: int, hidden: torch.Tensor) -> float:
    start = time.perf_counter()
    communicator.send(_frame(kind, hidden))
    frame = communicator.recv()
    elapsed_s = time.perf_counter() - start
    if frame.micro_batch != kind:
        raise StageError(f"link: found answer {frame.micro_batch}, expected {kind}")
    return elapsed_s


def _samples(job: LinkJob, times: list[list[float]], cold_s: float) -> tuple[CommSample, ...]:
    small = min(job.sizes)
    latency_s = median(times[0]) / 2.0
    samples = []
    for (out, back), values in zip(job.exchanges, times, strict=True):
        ends = job.between if back == small else job.between[::-1]
        seconds = latency_s if out == back else max(_LEAST_S, median(values) - latency_s)
        samples.append(
            CommSample(
                source=ends[0], target=ends[1], size_bytes=max(out, back), seconds=seconds + cold_s
            )
        )
    first, second = job.between
    reverse = CommSample(source=second, target=first, size_bytes=small, seconds=latency_s + cold_s)
    return (*samples, reverse)


def _provenance(
    job: LinkJob, times: list[list[float]], cold_s: float, noise: float
) -> tuple[tuple[str, str], ...]:
    return (
        ("seconds of", "a frame from the start of its send until the receiver holds it"),
        ("of these", f"{cold_s:.6f} because memory was read since the last one"),
        ("rounds", str(len(times[0]))),
        spread_line(noise),
        ("torch", torch.__version__),
        ("llmpq", __version__),
        ("seed", str(job.seed)),
    )
