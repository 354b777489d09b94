"""Time one decoder layer of a model over a grid of shapes, at every bitwidth, in both phases.

What is timed is what runs: the runtime's own stage with its KV slots and its kernels. A few layers
run in a row and share the time, because one layer alone would find its weights in the cache, and
would pay by itself for the masks and positions that a stage prepares once.

The points of all bitwidths are interleaved in a seeded random order and repeated in rounds, so that
a slow minute of a shared machine spoils no single point; the table keeps medians and tells the
noise.

Shapes: ``[R, T, H]`` rows (sequences), tokens, hidden size.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import torch

from llmpq import __version__
from llmpq.dist.kv_cache import KVCache
from llmpq.errors import SpecError
from llmpq.models import DecoderStage, Master, MicroBatch, kv_shapes, load_config
from llmpq.quant.loader import load_master, load_stage
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample, LatencyTable

MASTER_BITS = 0
"""Marks the master's own work in a table: embedding, final norm, head and the choice of a token."""

MIN_ROUNDS = 3

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGrid:
    """The shapes to time.

    Attributes:
        batches: sequences in a micro-batch.
        prompt_tokens: prompt lengths of prefill points.
        context_tokens: context lengths of decode points.
        max_prefill_tokens: prefill points with more tokens in all are left out, because they take
            long and large products are the easy part of the model.
    """

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    prompt_tokens: tuple[int, ...] = (16, 64, 128, 256, 512)
    context_tokens: tuple[int, ...] = (32, 128, 512, 1024)
    max_prefill_tokens: int = 8192

    def points(self) -> list[tuple[Phase, int, int]]:
        """Return ``(phase, batch, tokens)`` of every point."""
        prefill = [
            (Phase.PREFILL, batch, tokens)
            for batch in self.batches
            for tokens in self.prompt_tokens
            if batch * tokens <= self.max_prefill_tokens
        ]
        decode = [
            (Phase.DECODE, batch, tokens)
            for batch in self.batches
            for tokens in self.context_tokens
        ]
        return prefill + decode

    @property
    def max_tokens(self) -> int:
        """The longest sequence of the grid."""
        return max(*self.prompt_tokens, *self.context_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    phase: Phase
    bits: int
    batch: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerJob:
    """What to measure.

    Attributes:
        model_dir: directory with ``config.json`` and safetensors.
        bits: bitwidths.
        grid: shapes.
        dtype: number format of activations and of whatever is not quantized.
        device: where to run.
        layers: decoder layers timed in a row; the table holds a layer's share.
        budget_s: no new round is started after this many seconds; at least three are made.
        seed: order of the points and values of the activations.
    """

    model_dir: Path
    bits: tuple[int, ...]
    grid: LayerGrid
    dtype: torch.dtype
    device: torch.device
    layers: int = 4
    budget_s: float = 60.0
    seed: int = 0


def profile_layer(job: LayerJob, progress: Progress | None = None) -> LatencyTable:
    """Measure the first decoder layers and the master's work; return medians.

    Args:
        job: what to measure.
        progress: called with rounds of points done and planned.

    Raises:
        SpecError: the grid does not fit the model's positions.
    """
    bench = _Bench(job)
    points = [
        _Point(phase=phase, bits=width, batch=batch, tokens=tokens)
        for phase, batch, tokens in job.grid.points()
        for width in (*job.bits, MASTER_BITS)
    ]
    times = _measure(bench, points, progress)
    samples = tuple(
        LatencySample(
            phase=point.phase,
            bits=point.bits,
            batch=point.batch,
            tokens=point.tokens,
            seconds=median(times[point]),
        )
        for point in points
    )
    return LatencyTable(samples=samples, provenance=_provenance(times, job))


class _Bench:
    """The objects under test: one short stage a bitwidth, the master, and KV slots."""

    def __init__(self, job: LayerJob) -> None:
        config = load_config(job.model_dir)
        limit = getattr(config, "max_position_embeddings", None)
        if limit is not None and job.grid.max_tokens > limit:
            raise SpecError(
                f"{job.model_dir}: grid of up to {job.grid.max_tokens} tokens, "
                f"expected at most the model's {limit} positions"
            )
        self.job = job
        self.num_layers: int = min(job.layers, config.num_hidden_layers)
        self.stages: dict[int, DecoderStage] = {
            width: load_stage(
                job.model_dir,
                0,
                self.num_layers,
                [width] * self.num_layers,
                dtype=job.dtype,
                device=job.device,
            )
            for width in job.bits
        }
        self.master: Master = load_master(job.model_dir, dtype=job.dtype, device=job.device)
        self.cache = KVCache(
            kv_shapes(config, 0, self.num_layers),
            0,
            num_slots=max(job.grid.batches),
            max_tokens=job.grid.max_tokens + 1,
            dtype=job.dtype,
            device=job.device,
        )
        tokens = torch.arange(8, device=job.device)[None]  # [1, 8]
        self.hidden = self.master.embed(tokens, tokens)[:, :1]  # [1, 1, H]

    @torch.inference_mode()
    def run(self, point: _Point) -> float:
        """Return the seconds of one layer, or of the master's work, in one call."""
        new = point.tokens if point.phase is Phase.PREFILL else 1
        batch = MicroBatch.build(
            slots=range(point.batch),
            starts=[point.tokens - new] * point.batch,
            counts=[new] * point.batch,
        )
        if point.bits == MASTER_BITS:
            return self._run_master(batch)
        hidden = self.hidden.expand(point.batch, new, -1).contiguous()  # [R, T, H]
        stage = self.stages[point.bits]
        return self._timed(lambda: stage(hidden, batch, self.cache)) / self.num_layers

    def _run_master(self, batch: MicroBatch) -> float:
        tokens = torch.zeros_like(batch.positions).to(self.job.device)  # [R, T]

        def work() -> None:
            hidden = self.master.embed(tokens, batch.positions)
            self.master.logits(hidden[:, -1]).argmax(-1)

        return self._timed(work)

    def _timed(self, work: Callable[[], object]) -> float:
        self._synchronize()
        start = time.perf_counter()
        work()
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self.job.device.type == "cuda":
            torch.cuda.synchronize(self.job.device)


def _measure(
    bench: _Bench, points: list[_Point], progress: Progress | None
) -> dict[_Point, list[float]]:
    """Repeat all points in shuffled rounds until the budget is spent."""
    times: dict[_Point, list[float]] = {point: [] for point in points}
    for point in points:  # warm-up: first calls allocate, compile and choose kernels
        bench.run(point)
    shuffle = random.Random(bench.job.seed)
    start = time.perf_counter()
    rounds = 0
    while rounds < MIN_ROUNDS or time.perf_counter() - start < bench.job.budget_s:
        order = points[:]
        shuffle.shuffle(order)
        for point in order:
            times[point].append(bench.run(point))
        rounds += 1
        if progress is not None:
            elapsed = time.perf_counter() - start
            progress(rounds, max(rounds, MIN_ROUNDS, round(rounds * bench.job.budget_s / elapsed)))
    return times


def _provenance(times: dict[_Point, list[float]], job: LayerJob) -> tuple[tuple[str, str], ...]:
    rounds = len(next(iter(times.values())))
    return (
        ("dtype", str(job.dtype).removeprefix("torch.")),
        ("seconds of", "one decoder layer; rows of 0 bits are the master's own work"),
        ("layers timed in a row", str(job.layers)),
        ("rounds", str(rounds)),
        ("noise", f"{_noise(times):.1%} median interquartile range over median"),
        ("threads", str(torch.get_num_threads())),
        ("torch", torch.__version__),
        ("llmpq", __version__),
        ("seed", str(job.seed)),
    )


def _noise(times: dict[_Point, list[float]]) -> float:
    spreads = []
    for values in times.values():
        low, middle, high = quantiles(values, n=4)
        spreads.append((high - low) / middle)
    return median(spreads)
