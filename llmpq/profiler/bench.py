"""The objects that are timed: the runtime's own stages at every bitwidth, and the master's engine.

A stage is timed with few and with more layers in a row: the difference is the time of a layer, and
the rest is the overhead of a stage. For the master the engine answers requests over a stage without
layers, which reads other memory outside the timing: layers evict the head from the caches.

Shapes: ``[1, N, H]`` tokens of all rows (sequences), hidden size.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from llmpq.batching import HybridPolicy, PolicyScheduler, uniform_depth
from llmpq.batching.blocks import blocks_of, slot_blocks
from llmpq.batching.policy_scheduler import slot_limits
from llmpq.dist.engine.batch_run import BatchRun, FinishedAnswer
from llmpq.dist.engine.compiled_steps import step_runner_of
from llmpq.dist.engine.cuda_graphs import DecodeGraphs
from llmpq.dist.engine.executor import PipelineExecutor, StageRunner
from llmpq.dist.io.prompts import Request
from llmpq.dist.kv.cache import KVCache
from llmpq.dist.launch.process_environment import tune_malloc_for_serving
from llmpq.dist.metrics.stats import StageClock, synchronize
from llmpq.dist.transport.frames import Row
from llmpq.errors import SpecError
from llmpq.models import DecoderStage, Master, kv_shapes, load_config
from llmpq.profiler.grid import Shape
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.loading.master import load_master
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.huggingface.quantization import stored_head
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import BITS, Phase
from llmpq.spec.tables import MASTER_BITS, master_bits

MASTER_STEPS = 4
"""Decode steps after every prefill of the master; the first of them is not timed."""
OTHER_SHAPE = (3072, 4096)
"""Shape of the float32 matrix read in place of layers: 48 MiB, more than most last-level caches."""
BURST = 3
"""Timed runs of a short trial after one that warms the caches, as in a busy pipeline; their median
counts. How much longer the first one takes is part of a stage's overhead: a pipeline's step follows
a wait or the master's work."""
LONG_S = 0.05
"""Seconds of a run from which the state of the caches hardly matters: it makes no burst."""
LEAST_LAYERS = 6
"""Layers in a row that are timed where no number is given, or more, or all that the model has."""
DISTINCT_BYTES = 128 * 2**20
"""Weights of a stage that no cache holds."""
FEW_ROWS = 256
"""Rows up to which a prefill is timed with more layers too; beyond, the overhead of a stage is
small against the spread of one layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One micro-batch to time on layers in a row; no layers and ``master_bits``: the master."""

    shape: Shape
    bits: int
    layers: int

    @property
    def is_master(self) -> bool:
        """Whether the master's own work is timed."""
        return self.bits <= MASTER_BITS


def is_short(trial: TimedStep) -> bool:
    """Whether a run is so short that the state of the caches matters."""
    shape = trial.shape
    return not trial.is_master and (
        shape.phase is Phase.DECODE or shape.batch * shape.tokens <= FEW_ROWS
    )


def runs_of_timing(trial: TimedStep, run_s: float) -> int:
    """Return how often layers run to be timed once, if a run takes so long."""
    return 1 + BURST if is_short(trial) and run_s < LONG_S else 1


def layers_beyond_caches(layer_bytes: float, distinct_bytes: int = DISTINCT_BYTES) -> int:
    """Return how many layers of a size have more weights than caches hold."""
    return max(1, math.ceil(distinct_bytes / layer_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of a trial."""

    trial: TimedStep
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerJob:
    """A grid of shapes to time on the layers of a model, and the seconds to spend.

    Attributes:
        shapes: the grid.
        dtype: number format of activations and unquantized weights.
        head_bits: bits below 16 at which the head is timed, too.
        layers: most decoder layers timed in a row; a third of them (at most 2) is timed too. By
            default as many as :func:`layers_beyond_caches` at each bitwidth, at least 6: a stage of
            fewer small layers finds its weights in a cache, and that of a plan does not.
        budget_s: seconds to spend on timing; every point is timed at least once.
        seed: order of the points.
    """

    model_dir: Path
    bits: tuple[int, ...]
    shapes: tuple[Shape, ...]
    dtype: torch.dtype
    device: torch.device
    head_bits: tuple[int, ...] = ()
    layers: int | None = None
    budget_s: float = 60.0
    seed: int = 0

    @property
    def max_batch(self) -> int:
        """Sequences of the largest micro-batch."""
        return max(shape.batch for shape in self.shapes)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence."""
        return max(shape.tokens for shape in self.shapes)

    def depths(self) -> dict[int, int]:
        """Return by bitwidth how many layers are timed in a row, at most those of the model."""
        model = load_model_dir(self.model_dir)
        if self.layers is not None:
            return dict.fromkeys(self.bits, min(self.layers, model.num_layers))
        weights = min(layer.active_weight_parameters for layer in model.layers)
        depths = {}
        for bits in self.bits:
            layer_bytes = weights * (self.dtype.itemsize if bits == max(BITS) else bits / 8)
            wanted = max(LEAST_LAYERS, layers_beyond_caches(layer_bytes))
            depths[bits] = min(wanted, model.num_layers)
        return depths


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _OtherMemory(StageRunner):
    """A stage without layers that reads other memory and records each micro-batch's seconds."""

    other: Tensor
    spent_s: list[float]
    now: Callable[[], float]

    def run(self, hidden: Tensor, rows: Sequence[Row], only: Sequence[int] | None = None) -> Tensor:
        synchronize(self.device)
        start = self.now()
        torch.mv(self.other, self.other[0])
        synchronize(self.device)
        self.spent_s.append(self.now() - start)
        return StageRunner.run(self, hidden, rows, only)


class LayerBench:
    """One short stage per bitwidth, the master, and KV blocks.

    ``first_run_s`` holds by phase the extra seconds of the first run of each burst of few layers;
    ``now`` is the clock, in seconds.

    Raises:
        SpecError: the grid does not fit the model's positions.
    """

    def __init__(self, job: LayerJob, now: Callable[[], float] = time.perf_counter) -> None:
        config = load_config(job.model_dir)
        limit = getattr(config, "max_position_embeddings", None)
        if limit is not None and job.max_tokens > limit:
            raise SpecError(
                f"{job.model_dir}: grid of up to {job.max_tokens} tokens, "
                f"expected at most the model's {limit} positions"
            )
        self.job = job
        self.now = now
        self.depths = job.depths()
        depth = max(self.depths.values())
        self.few: int = max(1, min(2, min(self.depths.values()) // 3))
        self.first_run_s: dict[Phase, list[float]] = {phase: [] for phase in Phase}
        stages: dict[tuple[int, int], DecoderStage] = {}
        for width, layers in self.depths.items():
            stage = load_stage(
                job.model_dir, 0, layers, [width] * layers, dtype=job.dtype, device=job.device
            )
            stages[width, layers] = stage
            if self.few < layers:
                few = [stage.layers[index] for index in range(self.few)]
                stages[width, self.few] = DecoderStage(stage.config, few, 0)
        # A head that is stored quantized has no other bits.
        stored = stored_head(job.model_dir)
        widths = (16, *job.head_bits) if stored is None else (stored.bits,)
        self._plain_bits = master_bits(widths[0])
        self._masters: dict[int, Master] = {
            master_bits(width): load_master(
                job.model_dir, dtype=job.dtype, device=job.device, head_bits=width
            )
            for width in widths
        }
        deepest = next(stage for (_, layers), stage in stages.items() if layers == depth)
        shapes = kv_shapes(config, 0, depth)
        own = next(
            count
            for count in range(min(depth, LEAST_LAYERS), depth + 1)
            if set(shapes[:count]) == set(shapes)
        )
        self._cache = KVCache(
            shapes[:own], 0, num_blocks=job.max_batch * blocks_of(job.max_tokens + 1),
            dtype=job.dtype, device=job.device, states=deepest.new_states(job.max_batch),
        )  # fmt: skip
        self._cache.repeat_layers(shapes[own:])
        self._runners = {key: self._runner(stage) for key, stage in stages.items()}
        tokens = torch.arange(8, device=job.device)[None]  # [1, 8]
        self._hidden = self._masters[self._plain_bits].embed(tokens, tokens)[:, :1]  # [1, 1, H]
        self._other = torch.ones(OTHER_SHAPE, device=job.device)
        tune_malloc_for_serving()  # as a rank does once it is loaded

    def trials(self) -> list[list[TimedStep]]:
        """Return the trials, one list per bitwidth; the master's is the last."""
        wide = [[t for s in self.job.shapes for t in self._depths(s, b)] for b in self.job.bits]
        prompts = [shape for shape in self.job.shapes if shape.phase is Phase.PREFILL]
        batches = {shape.batch for shape in self.job.shapes}
        missing = batches - {s.batch for s in prompts}
        shortest = min((shape.tokens for shape in prompts), default=1)
        prompts += [
            Shape(phase=Phase.PREFILL, batch=batch, tokens=shortest) for batch in sorted(missing)
        ]
        # With a quantized head decode steps are enough: a prefill scores as many positions.
        steps = [Shape(phase=Phase.DECODE, batch=b, tokens=1) for b in sorted(batches)]
        heads = [
            [TimedStep(shape=shape, bits=bits, layers=0) for shape in steps]
            for bits in self._masters
            if bits != self._plain_bits
        ]
        plain = [TimedStep(shape=shape, bits=self._plain_bits, layers=0) for shape in prompts]
        return [*wide, *heads, plain]

    def _depths(self, shape: Shape, bits: int) -> list[TimedStep]:
        few = TimedStep(shape=shape, bits=bits, layers=self.few)
        depth = self.depths[bits]
        if self.few == depth:
            return [few]
        if shape.phase is Phase.PREFILL and shape.batch * shape.tokens > FEW_ROWS:
            return [few]
        return [few, TimedStep(shape=shape, bits=bits, layers=depth)]

    @torch.inference_mode()
    def prepare(self, trial: TimedStep) -> list[Timing]:
        """Run a trial for the first time: such runs allocate, compile and choose kernels."""
        if trial.is_master:
            return self._run_master(trial.shape, trial.bits)
        return [Timing(trial=trial, seconds=self._run_once(trial))]

    @torch.inference_mode()
    def run(self, trial: TimedStep) -> list[Timing]:
        """Time a trial once; a trial of the master also times decode steps of its batch."""
        if trial.is_master:
            return self._run_master(trial.shape, trial.bits)
        first_s = self._run_once(trial)
        more = runs_of_timing(trial, first_s) - 1
        if not more:
            return [Timing(trial=trial, seconds=first_s)]
        seconds_s = median(self._run_once(trial) for _ in range(more))
        if trial.layers == self.few:
            self.first_run_s[trial.shape.phase].append(first_s - seconds_s)
        return [Timing(trial=trial, seconds=seconds_s)]

    def _run_once(self, trial: TimedStep) -> float:
        shape = trial.shape
        new = shape.tokens if shape.phase is Phase.PREFILL else 1
        hidden = self._hidden.expand(1, shape.batch * new, -1).contiguous()  # [1, N, H]
        runner = self._runners[trial.bits, trial.layers]
        first = shape.tokens - new
        most = self.job.max_tokens + 1
        tables = [slot_blocks(slot, most, shape.tokens) for slot in range(shape.batch)]
        rows = [
            Row(blocks=table, first=first, length=shape.tokens, slot=slot)
            for slot, table in enumerate(tables)
        ]
        synchronize(self.job.device)
        start = self.now()
        runner.run(hidden, rows)
        synchronize(self.job.device)
        return self.now() - start

    def _runner(self, stage: DecoderStage) -> StageRunner:
        """Return a runner as a rank has it, with graphs of the decode shapes of the grid."""
        steps = step_runner_of(stage, self._cache)
        if isinstance(steps, DecodeGraphs):
            decode = [shape for shape in self.job.shapes if shape.phase is Phase.DECODE]
            steps.capture({shape.batch for shape in decode}, self.job.max_tokens + 1)
        return StageRunner(
            layers=stage,
            cache=self._cache,
            device=self.job.device,
            is_last=False,
            steps=steps,
            chunk_tokens=sys.maxsize,  # cost models add up chunks from whole prompts
        )

    def _run_master(self, shape: Shape, bits: int) -> list[Timing]:
        """Let an engine answer prompts over a stage without layers; time its steps.

        The prompts have as many tokens as the shape; of a decode shape only decode is timed.
        """
        spans = master_steps_s(self._masters[bits], shape, self._other, self.now)
        decode = Shape(phase=Phase.DECODE, batch=shape.batch, tokens=1)
        timed = [(shape, spans[0])] if shape.phase is Phase.PREFILL else []
        timed += [(decode, span) for span in spans[2:]]
        return [
            Timing(trial=TimedStep(shape=one, bits=bits, layers=0), seconds=span)
            for one, span in timed
        ]


def master_steps_s(
    master: Master, shape: Shape, other: Tensor, now: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Return the seconds of an engine's steps over a stage without layers: prefill, then decode.

    Args:
        master: whose steps are timed.
        shape: rows and tokens of the prompts.
        other: read outside the timing in each step, as layers are.
        now: the clock, in seconds.
    """
    sizes = MicroBatching(prefill=shape.batch, decode=shape.batch)
    runner = _OtherMemory(
        layers=None, cache=None, device=other.device, is_last=True,
        other=other, spent_s=[], now=now,
    )  # fmt: skip
    clock = StageClock(micro_batching=sizes)
    limits = slot_limits(shape.batch, shape.tokens + 1 + MASTER_STEPS)
    policy = HybridPolicy(micro_batching=sizes, num_slots=shape.batch, num_stages=1)
    run = BatchRun(
        executor=PipelineExecutor(master=master, runner=runner, communicator=None, clock=clock),
        scheduler=PolicyScheduler(policy, limits, uniform_depth(1)),
        limits=limits,
        clock=clock,
    )
    requests = [
        Request(
            id=str(number), prompt_token_ids=(1,) * shape.tokens, max_new_tokens=1 + MASTER_STEPS
        )
        for number in range(shape.batch)
    ]
    step_ends_s = [now()]
    run.run(requests, _forget, lambda _: step_ends_s.append(now()))
    return [
        after - before - spent_s
        for (before, after), spent_s in zip(pairwise(step_ends_s), runner.spent_s, strict=True)
    ]


def _forget(_: FinishedAnswer) -> None:
    return
