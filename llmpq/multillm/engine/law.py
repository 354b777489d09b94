"""Seconds of an engine as tables of the simulator, from measured iterations or from layers.

- A table of measured iterations of a whole model.
- Per-layer costs on one device, or on a team of devices that share every layer: layers over the
  devices of the team, and two all-reduces a layer.
- A plan of ours, a pipeline of stages: sequences that decode are split evenly over the steps in
  flight, one more than there are stages, so a round takes the sum over the stages, or as often as
  there are steps the slowest of them. Prompts follow each other, so a chunk takes the slowest
  stage. A stage receives and sends a message in each step.

Seconds are evaluated at some batches, contexts and prompts, and are linear between them.

Measured iterations follow the law of layers (``llmpq.costmodel.tables.latency``), over the running
requests and the tokens of each: the padded length in prefill, the mean and the longest in decode.
Whole iterations count, with the overhead that computation, preparation and sampling leave out
(scheduler, output processing; 16 to 38 % of decode in the published tables).

The compiled simulator of one engine, called through ctypes.

The structures mirror ``csrc/engine.c``, which documents every field. The first use compiles it.
"""

from __future__ import annotations

import ctypes
import gzip
import io
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_double, c_int32, c_int64
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llmpq.costmodel import ClusterCosts
from llmpq.costmodel.base import prompt_s
from llmpq.costmodel.tables.latency import Curve, Samples
from llmpq.errors import CapacityError, SolverError, SpecError, bad_field
from llmpq.native_build import NotCompiledError, library_path
from llmpq.options.engine import EngineOptions
from llmpq.options.limits import engine_limits
from llmpq.sim.costs import BatchShape, PlanCosts
from llmpq.spec.cluster import Device
from llmpq.spec.fields import decode_text
from llmpq.spec.model import ModelSpec
from llmpq.spec.plan import Plan
from llmpq.spec.precision import DTYPE_BYTES, Phase
from llmpq.spec.runtime_constants import KV_BLOCK_SIZE

FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fPIC", "-shared")
ABI = 1
POINTS = 512
"""Points of a curve at most."""
DONE, NO_MEMORY, TOO_LONG = range(3)

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_Doubles, _Longs = POINTER(c_double), POINTER(c_int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineModel:
    """Limits and seconds of one engine.

    Attributes:
        mixed: steps mix decode tokens and chunks of prompts, up to the budget (ours, vLLM 1);
            otherwise waiting prompts are prefilled first, padded to the longest (vLLM 0.2-0.4).
        max_sequences: running sequences.
        token_budget: tokens of a mixed step, or padded tokens of a prefill iteration.
        num_blocks: KV blocks of ``block_size`` tokens.
        watermark_blocks: blocks that an admission leaves free while sequences run.
        prefill: weights of 1 and ``B s`` by batch [max_sequences + 1, 2].
        decode: weights of 1, ``S`` and ``B s`` by batch [max_sequences + 1, 3].
        packed: seconds of a mixed step of so many tokens [token_budget + 1], empty if not mixed.
        attention: seconds of a chunk ``[f, f + k)`` of a prompt, over ``(f + k)^2 - f^2``.
        flops_token: operations of one token without attention.
        flops_key: operations of attention of one token to one key.
    """

    mixed: bool
    max_sequences: int
    token_budget: int
    num_blocks: int
    block_size: int
    watermark_blocks: int
    prefill: Array
    decode: Array
    packed: Array
    attention: float
    flops_token: float
    flops_key: float

    @property
    def max_tokens(self) -> int:
        """Longest sequence that the blocks hold."""
        return self.num_blocks * self.block_size

    @cached_property
    def structure(self) -> _Engine:
        """The law as the core reads it; the law must outlive it."""
        found = _Engine()
        for name in ("prefill", "decode", "packed"):
            array = np.ascontiguousarray(getattr(self, name), np.float64)
            self._held.append(array)
            setattr(found, name, array.ctypes.data_as(_Doubles))
        for name in (
            "mixed", "max_sequences", "token_budget", "num_blocks", "block_size",
            "watermark_blocks", "attention", "flops_token", "flops_key",
        ):  # fmt: skip
            setattr(found, name, getattr(self, name))
        return found

    @cached_property
    def _held(self) -> list[Array]:
        return []


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineRun:
    """What became of the requests of one engine.

    Attributes:
        finish_s: when each was finished [n]; infinite if not.
        made: tokens that each generated [n].
        curve: time, useful operations and seconds of computing so far, rising [points, 3].
        iterations: prefill, decode or mixed ones.
        preemptions: sequences that gave their blocks back.
    """

    finish_s: Array
    made: Ints
    curve: Array
    iterations: int
    preemptions: int


class _Engine(Structure):
    _fields_ = (
        ("mixed", c_int32),
        ("max_sequences", c_int32),
        *((name, c_int64) for name in ("token_budget", "num_blocks", "block_size")),
        ("watermark_blocks", c_int64),
        *((name, _Doubles) for name in ("prefill", "decode", "packed")),
        *((name, c_double) for name in ("attention", "flops_token", "flops_key")),
    )


class _Requests(Structure):
    _fields_ = (
        ("count", c_int64),
        ("order_count", c_int64),
        ("order", _Longs),
        ("ready", _Doubles),
        *((name, _Longs) for name in ("prompt", "answer", "next")),
        ("work", _Doubles),
        ("start_s", c_double),
        ("end_s", c_double),
        ("finish", _Doubles),
        ("made", _Longs),
        ("curve", _Doubles),
        *((name, c_int64) for name in ("points", "iterations", "preemptions")),
    )


def play(  # noqa: PLR0913  the columns of the requests
    law: EngineModel,
    *,
    ready_s: Array,
    prompt: Ints,
    answer: Ints,
    following: Ints,
    work: Array,
    start_s: float = 0.0,
    end_s: float = np.inf,
) -> EngineRun:
    """Simulate one engine.

    Args:
        law: its limits and seconds.
        ready_s: when each request becomes ready [n]; infinite for those that follow another one,
            and for those that never do.
        prompt: tokens to prefill [n], with those that an earlier process generated.
        answer: tokens to generate [n].
        following: request that becomes ready when this one finishes [n], -1 for none.
        work: operations that the first prefill of each request counts [n].
        start_s: when the engine is ready.
        end_s: no iteration begins then or later.

    Raises:
        CapacityError: a request is longer than all blocks.
        SolverError: the core could not be compiled, or found no memory.
    """
    count = len(prompt)
    finish = np.full(count, np.inf)
    made = np.zeros(count, np.int64)
    curve = np.zeros((POINTS, 3))
    order = np.argsort(ready_s, kind="stable")
    order = order[: int(np.isfinite(ready_s).sum())]
    held: Sequence[tuple[str, Array | Ints, type]] = (
        ("order", np.ascontiguousarray(order, np.int64), _Longs),
        ("ready", np.ascontiguousarray(ready_s, np.float64), _Doubles),
        ("prompt", np.ascontiguousarray(prompt, np.int64), _Longs),
        ("answer", np.ascontiguousarray(answer, np.int64), _Longs),
        ("next", np.ascontiguousarray(following, np.int64), _Longs),
        ("work", np.ascontiguousarray(work, np.float64), _Doubles),
        ("finish", finish, _Doubles),
        ("made", made, _Longs),
        ("curve", curve, _Doubles),
    )
    requests = _Requests(count=count, order_count=len(order), start_s=start_s, end_s=end_s)
    for name, array, kind in held:
        setattr(requests, name, array.ctypes.data_as(kind))
    status = library().engine_play(law.structure, requests)
    if status == TOO_LONG:
        raise CapacityError(
            f"engine: found a request of {int((prompt + answer).max())} tokens, expected at most "
            f"{law.max_tokens}, which its memory holds"
        )
    if status != DONE:
        raise SolverError("engine: found no memory for the simulation")
    return EngineRun(
        finish_s=finish,
        made=made,
        curve=curve[: requests.points].copy(),
        iterations=requests.iterations,
        preemptions=requests.preemptions,
    )


@cache
def library() -> ctypes.CDLL:
    """Load the compiled core, compiling it when needed.

    Raises:
        SolverError: there is none, and it cannot be compiled or stored.
    """
    try:
        path = library_path(Path(__file__).parent, "engine", FLAGS, "_engine*.so")
    except NotCompiledError as error:
        raise SolverError(f"the simulator of applications: {error}") from error
    loaded = ctypes.CDLL(str(path))
    if loaded.engine_abi() != ABI:
        raise SolverError(
            f"{path}: found version {loaded.engine_abi()} of the core, expected {ABI}"
        )
    loaded.engine_play.argtypes = (POINTER(_Engine), POINTER(_Requests))
    loaded.engine_play.restype = c_int32
    return loaded


COLUMNS = (
    "is_prefill", "num_seqs", "total_tokens", "max_seqlen",
    "iter_ms", "exec_ms", "sample_ms", "prep_ms",
)  # fmt: skip
"""Columns that are read; others may be there."""
WARM_UP_ROWS = 2
"""First rows of a table, slower than all later ones of their shape."""
_MS = 1e-3
PER_OCTAVE = 32
"""Cells between a size and its double. Shapes of one cell count as repetitions, by their median."""


@dataclass(frozen=True, kw_only=True, eq=False)
class IterationTable:
    """Measured iterations of one model on one set of devices, one row each.

    Attributes:
        is_prefill: whether the iteration is a prefill, else a decode iteration [n].
        batch: running requests ``B`` [n].
        tokens: total length ``S`` of the requests [n].
        longest: longest of them ``s`` [n].
        seconds: whole iteration [n].
        parts: computation, preparation and sampling in seconds [3, n].
    """

    is_prefill: npt.NDArray[np.bool_]
    batch: Array
    tokens: Array
    longest: Array
    seconds: Array
    parts: Array

    def select(self, rows: npt.NDArray[np.bool_]) -> IterationTable:
        """Return the chosen rows."""
        return IterationTable(
            is_prefill=self.is_prefill[rows],
            batch=self.batch[rows],
            tokens=self.tokens[rows],
            longest=self.longest[rows],
            seconds=self.seconds[rows],
            parts=self.parts[:, rows],
        )


def read_iterations(path: str | Path) -> IterationTable:
    """Read a table in SamuLLM's layout, CSV or gzipped CSV with times in milliseconds.

    Raises:
        SpecError: the file cannot be read, lacks a column, or holds a value that is no number, is
            negative, or a duration of 0; names the file and the column.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError) as error:
        raise SpecError(f"{path}: cannot be read: {error}") from None
    text = decode_text(data, str(path))
    header = text.partition("\n")[0].strip().split(",")
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise bad_field(str(path), missing[0], header, "a column of that name")
    try:
        values = np.loadtxt(
            io.StringIO(text), delimiter=",", skiprows=1 + WARM_UP_ROWS, ndmin=2,
            usecols=[header.index(name) for name in COLUMNS],
        ).T  # fmt: skip
    except ValueError as error:
        raise SpecError(f"{path}: found a row that is not of numbers: {error}") from None
    if not values.size:
        raise SpecError(f"{path}: found no rows after {WARM_UP_ROWS} of warm-up, expected some")
    columns = dict(zip(COLUMNS, values, strict=True))
    for name, column in columns.items():
        least = 1.0 if name in ("num_seqs", "total_tokens", "max_seqlen") else 0.0
        bad = ~(np.isfinite(column) & (column >= least))
        if bad.any():
            raise bad_field(str(path), name, float(column[bad][0]), f"numbers from {least:g} on")
    if not columns["iter_ms"].all():
        raise bad_field(str(path), "iter_ms", 0.0, "a duration above 0")
    return IterationTable(
        is_prefill=columns["is_prefill"] > 0,
        batch=columns["num_seqs"],
        tokens=columns["total_tokens"],
        longest=columns["max_seqlen"],
        seconds=columns["iter_ms"] * _MS,
        parts=np.stack([columns[name] for name in ("exec_ms", "prep_ms", "sample_ms")]) * _MS,
    )


class IterationModel:
    """Seconds of prefill and decode iterations, fitted to a table.

    Args:
        table: measured iterations.

    Raises:
        SpecError: the table has no prefill or no decode iterations.
    """

    def __init__(self, table: IterationTable) -> None:
        self._curves = {phase: Curve(_samples(table, phase)) for phase in Phase}

    def seconds(
        self, phase: Phase, batch: float, tokens: float, longest: float | None = None
    ) -> float:
        """Return the seconds of an iteration.

        Args:
            phase: of the iteration.
            batch: running requests, at least 1.
            tokens: padded length in prefill, mean length in decode; at least 1.
            longest: longest request; by default all have equally many tokens.
        """
        return self._curves[phase].seconds(batch, tokens, longest)


def shapes_of(table: IterationTable, phase: Phase) -> tuple[Array, npt.NDArray[np.intp]]:
    """Return batch, tokens and longest of iterations of one phase [3, n], and the cell of each."""
    tokens = table.longest if phase is Phase.PREFILL else table.tokens / table.batch
    tokens = np.maximum(tokens, 1.0)
    shapes = np.stack([table.batch, tokens, np.maximum(table.longest, tokens)])
    _, cells = np.unique(np.round(PER_OCTAVE * np.log2(shapes)), axis=1, return_inverse=True)
    return shapes, cells


def _samples(table: IterationTable, phase: Phase) -> Samples:
    """Return one sample for each cell of shapes: the medians of its iterations."""
    own = table.select(table.is_prefill == (phase is Phase.PREFILL))
    if not own.batch.size:
        raise SpecError(f"iteration table: found no {phase.value} iterations, expected some")
    shapes, cells = shapes_of(own, phase)
    points = np.concatenate([shapes, own.seconds[None]])
    medians = [np.median(points[:, cells == cell], axis=1) for cell in range(cells.max() + 1)]
    batch, tokens, longest, seconds = np.stack(medians, axis=1)
    return Samples(phase=phase, batch=batch, tokens=tokens, longest=longest, seconds=seconds)


MAX_SEQUENCES = 256
"""Running sequences of an engine, as in vLLM."""
MIN_PREFILL_TOKENS = 2048
"""Padded tokens of a prefill iteration of vLLM 0.2-0.4: these, or the longest sequence."""
REQUESTS_AHEAD = 2
"""Requests that an engine of ours has at once, in multiples of its plan's batch; the others wait in
the queue of the model."""
WATERMARK = 0.01
"""Share of the blocks that an admission leaves free."""
OVERHEAD_S = 5e-3
"""Scheduler, sampling and output processing of an iteration where no table states them: what the
published tables of SamuLLM have at a batch of 1 in addition to the model's computation."""
SHORT, LONG = 64.0, 2048.0
"""Contexts at which decode is evaluated."""

Seconds = Callable[[int, float], float]
"""Returns the seconds of so many sequences of so many tokens each."""
Uneven = Callable[[int, float, float], float]
"""The same with the longest of them; the tokens are those of a sequence in the mean."""


@dataclass(frozen=True, slots=True)
class FlopCount:
    """Operations of a model (SamuLLM, Eq. 1 and 2, two for each weight).

    Attributes:
        token: of one token, without attention.
        key: of attention of one token to one key.
    """

    token: float
    key: float

    @classmethod
    def of(cls, model: ModelSpec) -> FlopCount:
        """Return the operations of a model."""
        layers = [model.layer_types[kind] for kind in model.layer_kinds]
        return cls(
            token=2.0 * sum(layer.active_weight_parameters for layer in layers),
            key=4.0 * sum(layer.num_heads * layer.head_dim for layer in layers),
        )

    def prefill(self, tokens: Array) -> Array:
        """Return the operations of prompts of these lengths."""
        found: Array = self.token * tokens + self.key * tokens**2
        return found


def measured_law(
    iterations: IterationModel,
    operations: FlopCount,
    *,
    prompt_tokens: float,
    kv_tokens: int,
    max_model_len: int,
) -> EngineModel:
    """Return vLLM 0.2-0.4 with measured iterations.

    Args:
        iterations: seconds of whole iterations.
        operations: of the model.
        prompt_tokens: usual prompt.
        kv_tokens: tokens whose keys and values the memory holds.
        max_model_len: longest sequence.
    """
    return _separate(
        _prefill_weights(partial(iterations.seconds, Phase.PREFILL), prompt_tokens, MAX_SEQUENCES),
        _decode_weights(partial(iterations.seconds, Phase.DECODE), MAX_SEQUENCES),
        operations,
        kv_tokens,
        max_model_len,
    )


def team_law(
    costs: ClusterCosts,
    device: Device,
    members: int,
    *,
    prompt_tokens: float,
    kv_tokens: int,
    max_model_len: int,
) -> EngineModel:
    """Return vLLM 0.2-0.4 with per-layer costs of one device, shared by ``members`` like it.

    Args:
        costs: cost models of the model.
        device: one of the devices.
        members: devices that share every layer.
        prompt_tokens: usual prompt.
        kv_tokens: tokens whose keys and values the memories hold together.
        max_model_len: longest sequence.
    """
    model = costs.model

    def seconds(phase: Phase, batch: int, tokens: float) -> float:
        layers = sum(
            costs.layer_s(device, phase, 16, batch, tokens, kind) for kind in model.layer_kinds
        )
        own = layers + costs.master_s(device, phase, batch, tokens)
        rows = batch * (tokens if phase is Phase.PREFILL else 1.0)
        return own / members + _reduce_s(costs, device, members, rows) + OVERHEAD_S

    def prefill_s(batch: int, tokens: float) -> float:
        return seconds(Phase.PREFILL, batch, tokens)

    def decode_s(batch: int, tokens: float, longest: float) -> float:  # noqa: ARG001
        return seconds(Phase.DECODE, batch, tokens)

    return _separate(
        _prefill_weights(prefill_s, prompt_tokens, MAX_SEQUENCES),
        _decode_weights(decode_s, MAX_SEQUENCES),
        FlopCount.of(model),
        kv_tokens,
        max_model_len,
    )


def plan_law(plan: Plan, costs: ClusterCosts) -> EngineModel:
    """Return our engine on a plan: mixed steps, blocks for the plan's sequences."""
    own = PlanCosts(plan, costs)
    stages = range(own.layout.num_ranks)
    limits = engine_limits(plan, EngineOptions())
    depth = limits.steps_in_flight
    work = plan.workload

    def stage_s(rank: int, phase: Phase, rows: int, tokens: float) -> float:
        found = own.micro_batch_s(rank, phase, rows, tokens) if own.has_layers(rank, phase) else 0.0
        if rank == 0:
            found += own.master_s(phase, rows, tokens if phase is Phase.PREFILL else 1.0)
        return found

    def decode_s(batch: int, context: float, longest: float) -> float:  # noqa: ARG001
        steps = min(depth, batch)
        rows = -(-batch // steps)
        shape = BatchShape(phase=Phase.DECODE, rows=rows, longest=1, total=rows)
        hops = [own.hop(rank, shape) for rank in stages]
        each = [
            stage_s(rank, Phase.DECODE, rows, context) + 2.0 * hop.end_s
            for rank, hop in zip(stages, hops, strict=True)
        ]
        return max(sum(each) + sum(hop.delay_s for hop in hops), steps * max(each))

    def prompt(tokens: float) -> tuple[float, float]:
        """Return the largest seconds of a stage, without attention and of attention."""
        length = max(1, round(tokens))
        shape = BatchShape(phase=Phase.PREFILL, rows=1, longest=length, total=length)
        each = [prompt_s(partial(stage_s, rank, Phase.PREFILL), tokens) for rank in stages]
        linear = [
            own_s + 2.0 * own.hop(rank, shape).end_s
            for rank, (own_s, _) in zip(stages, each, strict=True)
        ]
        return max(linear), max(attention for _, attention in each)

    usual = float(work.prompt_tokens)
    budget = limits.token_budget
    at = _grid(budget)
    packed = np.interp(np.arange(budget + 1), at, [prompt(tokens)[0] for tokens in at])
    operations = FlopCount.of(costs.model)
    most = min(limits.max_sequences, REQUESTS_AHEAD * work.batch)
    return EngineModel(
        mixed=True,
        max_sequences=most,
        token_budget=budget,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        watermark_blocks=int(limits.watermark * limits.num_blocks),
        prefill=np.zeros((most + 1, 2)),
        decode=_decode_weights(decode_s, most, float(work.max_context_tokens)),
        packed=packed,
        attention=prompt(usual)[1] / usual**2,
        flops_token=operations.token,
        flops_key=operations.key,
    )


def _separate(
    prefill: Array, decode: Array, operations: FlopCount, kv_tokens: int, max_model_len: int
) -> EngineModel:
    blocks = kv_tokens // KV_BLOCK_SIZE
    return EngineModel(
        mixed=False,
        max_sequences=MAX_SEQUENCES,
        token_budget=max(MIN_PREFILL_TOKENS, max_model_len),
        num_blocks=blocks,
        block_size=KV_BLOCK_SIZE,
        watermark_blocks=int(WATERMARK * blocks),
        prefill=prefill,
        decode=decode,
        packed=np.zeros(0),
        attention=0.0,
        flops_token=operations.token,
        flops_key=operations.key,
    )


def _grid(most: int) -> Array:
    """Return numbers from 1 to ``most``, each at most a half larger than the one before."""
    found = [1]
    while found[-1] < most:
        found.append(min(most, max(found[-1] + 1, found[-1] * 3 // 2)))
    return np.array(found, np.float64)


def _decode_weights(seconds: Uneven, most: int, longest: float = LONG) -> Array:
    """Return the weights of 1, ``S`` and ``B s`` by batch [most + 1, 3], linear in the contexts."""
    batches = _grid(most)
    low, high = min(SHORT, longest / 2.0), max(longest, 2.0)
    shapes = ((low, low), (high, high), (low, high))
    at = np.array([[seconds(int(batch), *shape) for shape in shapes] for batch in batches])
    both = np.maximum(0.0, at[:, 1] - at[:, 0]) / (high - low)
    padding = np.minimum(both, np.maximum(0.0, at[:, 2] - at[:, 0]) / (high - low))
    every = np.arange(most + 1).clip(1)
    constant = np.interp(every, batches, np.maximum(0.0, at[:, 0] - both * low))
    slopes = [np.interp(every, batches, one) / every for one in (both - padding, padding)]
    return np.stack([constant, *slopes], axis=1)


def _prefill_weights(seconds: Seconds, tokens: float, most: int) -> Array:
    """Return the weights of 1 and ``B s`` by batch [most + 1, 2], linear about a usual prompt."""
    batches = _grid(most)
    low, high = max(1.0, tokens / 2.0), max(2.0, tokens * 2.0)
    at = np.array([[seconds(int(batch), low), seconds(int(batch), high)] for batch in batches])
    slope = np.maximum(0.0, at[:, 1] - at[:, 0]) / (high - low)
    every = np.arange(most + 1).clip(1)
    constant = np.interp(every, batches, np.maximum(0.0, at[:, 0] - slope * low))
    return np.stack([constant, np.interp(every, batches, slope) / every], axis=1)


def _reduce_s(costs: ClusterCosts, device: Device, members: int, rows: float) -> float:
    """Return the seconds of two ring all-reduces of the hidden states in every layer."""
    if members == 1:
        return 0.0
    link = costs.cluster.link(device, device, costs.specs[device.group])
    size = rows * costs.model.hidden_size * DTYPE_BYTES[costs.format_of(device)]
    one = 2.0 * (members - 1) * (size / members / link.bytes_per_s + link.latency_s)
    return 2.0 * costs.model.num_layers * one
