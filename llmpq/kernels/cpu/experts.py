"""Experts in a compiled step (``csrc/experts.h``): routing, products and weighted sums.

``HostPool`` is threads that compute experts beside the device that computes the rest of a layer.
They run the same operators on buffers of their own (``csrc/pool.c``); Python submits rows and
waits, or a compiled step does both.

Shapes: R rows (tokens), C columns, E experts, k experts of a row, F features of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Structure, addressof, byref, c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from llmpq.kernels.base import PreparedWeight
from llmpq.kernels.cpu.native import TYPES, has_steps, instruction_set, library
from llmpq.kernels.cpu.step import (
    ACTIVATIONS,
    GateRows,
    Kind,
    StepProgram,
    UnsupportedStepError,
    gate_rows,
)
from llmpq.spec.huggingface.feed_forward import Score
from llmpq.spec.runtime_constants import STEP_SLOTS


class RouteRows(Structure):
    """The choice of experts for a row (``csrc/experts.h``)."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "correction", "chosen", "weight")),
        *((name, c_int64) for name in ("experts", "count")),
        *((name, c_float) for name in ("factor", "jitter")),
        *((name, c_int32) for name in ("score", "normalizes", "type", "rounds")),
    )


class GatherRows(Structure):
    """Copies of rows, one for each of their experts."""

    _fields_ = (
        *((name, c_void_p) for name in ("route", "x", "y")),
        ("columns", c_int64),
        *((name, c_void_p) for name in ("prepared", "here")),
    )


class ActivateSlots(Structure):
    """An activation of what experts made of rows."""

    _fields_ = (("gate", GateRows), ("prepared", c_void_p))


class ExpertProducts(Structure):
    """Products of rows, each by the weights of its experts."""

    _fields_ = (
        *((name, c_void_p) for name in ("weights", "biases", "x", "y", "prepared")),
        ("few_limit", c_int64),
        *((name, c_int32) for name in ("kernel", "in_float", "gathered")),
    )


class CombineRows(Structure):
    """The sum of what the experts of a row made of it."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight", "y", "shared", "shared_gate", "apart")),
        *((name, c_int64) for name in ("columns", "count")),
    )


class HostLayer(Structure):
    """Experts of a layer that a pool of threads computes (``csrc/step.c``)."""

    _fields_ = (
        ("operators", c_void_p),
        ("count", c_int64),
        *((name, c_void_p) for name in ("route", "gather", "combine")),
        ("most_rows", c_int64),
        ("type", c_int32),
    )


class ApartRows(Structure):
    """Rows of a step for such experts."""

    _fields_ = (
        *((name, c_void_p) for name in ("pool", "layer", "x", "chosen", "weight", "y")),
        ("ticket", c_int32),
    )


SCORES: tuple[Score, ...] = ("softmax", "sigmoid", "sparse mixer")
"""In the order of ``csrc/experts.c``."""
_MOST_EXPERTS, _MOST_CHOICES = 1024, 64  # csrc/experts.h

ExpertMatrix = tuple[PreparedWeight | Tensor, Tensor | None]
"""Weight and bias of an expert's linear operator."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowRouter:
    """How the experts of a row are chosen and weighed.

    Attributes:
        weight: ``[E, C]``; its products with a row are the row's logits.
        bias: ``[E]`` of the logits.
        correction: float32 ``[E]``, added to the scores for the choice alone.
        count: k.
        score: of a logit; see ``RouterKind``.
        normalizes: whether the weights of a row are divided by their sum.
        factor: of the weights.
        jitter: half of the relative distance of logits that are near, for a sparse mixer.
        rounds_logits: whether logits are rounded to the dtype of the rows.
        rounds_weights: whether weights are.
    """

    weight: Tensor
    bias: Tensor | None = None
    correction: Tensor | None = None
    count: int
    score: Score
    normalizes: bool = False
    factor: float = 1.0
    jitter: float = 0.0
    rounds_logits: bool = False
    rounds_weights: bool = False

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and experts, each ``[R, k]``, of float32 logits ``[R, E]``."""
        if self.score == "sparse mixer":
            return self._mixed(logits)
        chosen = self._keys(logits).topk(self.count).indices
        weights = self._scores(logits).gather(1, chosen)
        if self.normalizes:
            weights = weights / weights.sum(1, keepdim=True)
        return weights * self.factor, chosen

    def margins(self, logits: Tensor) -> Tensor:
        """Return how far the last choice is from the next, ``[R]``, for logits ``[R, E]``.

        In standard deviations of what decides. A sparse mixer also decides which logits are near.
        """
        keys = self._keys(logits)
        gaps = torch.full((len(keys),), torch.inf)
        if self.count < keys.shape[1]:
            gaps = -keys.topk(self.count + 1).values[:, -2:].diff().squeeze(1)
        if self.score == "sparse mixer":
            for distance, limit in self._distances(logits):
                gaps = torch.minimum(gaps, (distance - limit).abs().amin(1))
        return gaps / keys.std(1).clamp_min(1e-30)

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid() if self.score == "sigmoid" else logits.softmax(1)

    def _keys(self, logits: Tensor) -> Tensor:
        """Return what decides the choice, ``[R, E]``."""
        return logits if self.correction is None else self._scores(logits) + self.correction

    def _distances(self, logits: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return distances of logits from each choice, and up to which they are near."""
        found, left = [], logits
        for _ in range(self.count):
            most, best = left.max(1, keepdim=True)
            limit = 2 * self.jitter * logits.abs().maximum(most)
            found.append((most - left, limit))
            left = left.scatter(1, best, -torch.inf)
        return found

    def _mixed(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = [], []
        for distance, limit in self._distances(logits):
            shares = (-distance).masked_fill(distance > limit, -torch.inf).softmax(1)
            chosen.append(distance.argmin(1, keepdim=True))
            weights.append(shares.gather(1, chosen[-1]))
        return torch.cat(weights, 1), torch.cat(chosen, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedActivation:
    """The activation of gpt_oss: ``(up + 1) gate sigmoid(alpha gate)`` of bounded gate and up.

    Attributes:
        alpha: factor inside the sigmoid.
        limit: largest gate, and largest magnitude of up. Features of both come in turn.
    """

    alpha: float
    limit: float


class ApartSum(NamedTuple):
    """A sum that other threads compute.

    Attributes:
        y: its buffer, ``[R, C]``.
        collect: appends that the step waits for it.
    """

    y: Tensor
    collect: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowExperts:
    """Matrices and activation of the experts of a layer, and what is added to their sum.

    Attributes:
        ups: of each expert: from C to 2 F features, gate and what it multiplies, or to F without a
            gate; ``None`` for an expert that is computed elsewhere.
        downs: of each expert: from F to C; likewise.
        activation: of the gate, one of ``ACTIVATIONS``, or of gate and up.
        has_gate: whether there is a gate.
        shared: buffer ``[R, C]`` that is added to their sum.
        shared_gate: buffer ``[R, 1]`` whose sigmoid multiplies ``shared``.
        apart: the sum over the experts that are computed elsewhere.
    """

    ups: Sequence[ExpertMatrix | None]
    downs: Sequence[ExpertMatrix | None]
    activation: str | ClampedActivation
    has_gate: bool = True
    shared: Tensor | None = None
    shared_gate: Tensor | None = None
    apart: ApartSum | None = None

    @property
    def here(self) -> list[bool]:
        """Which experts are computed here."""
        return [one is not None for one in self.ups]


def append_experts(
    program: StepProgram, x: Tensor, y: Tensor, route: RouteRows, experts: RowExperts
) -> None:
    """Append what makes the experts' sum ``y`` ``[R, C]`` of rows ``x`` ``[R, C]``.

    Args:
        program: to append to.
        x: rows.
        y: their sums.
        route: from :func:`append_route`.
        experts: of the layer.

    Raises:
        UnsupportedStepError: too many experts, or weights that differ or have no kernel.
    """
    hidden, shared, shared_gate = x.shape[1], experts.shared, experts.shared_gate
    combine = CombineRows(
        weight=route.weight,
        y=y.data_ptr(),
        shared=None if shared is None else shared.data_ptr(),
        shared_gate=None if shared_gate is None else shared_gate.data_ptr(),
        columns=hidden,
    )
    if any(experts.here):
        gather, found = _append_products(program, hidden, route, experts)
        gather.x, combine.x, combine.count = x.data_ptr(), found.data_ptr(), route.count
    if experts.apart is not None:
        combine.apart = experts.apart.y.data_ptr()
        experts.apart.collect()
    program.append(Kind.COMBINE, combine)


def host_layer(
    program: StepProgram, hidden_size: int, choices: int, experts: RowExperts
) -> HostLayer:
    """Return experts for the threads of a pool; the operators are those of ``program``.

    Args:
        program: an empty one, which lives as long as the result.
        hidden_size: C.
        choices: k.
        experts: of the layer; those that are elsewhere count as zeros.

    Raises:
        UnsupportedStepError: as :func:`append_experts`.
    """
    count = len(experts.ups)
    _limit_rows(program, count, choices, hidden_size)
    route = RouteRows(experts=count, count=choices)
    gather, found = _append_products(program, hidden_size, route, experts)
    combine = CombineRows(x=found.data_ptr(), columns=hidden_size, count=choices)
    program.append(Kind.COMBINE, combine)
    operators, number = program.operators(), len(program)
    return HostLayer(
        operators=operators,
        count=number,
        route=program.keep(route),
        gather=addressof(gather),
        combine=addressof(combine),
        most_rows=program.most_rows,
        type=TYPES[program.dtype],
    )


def append_apart(
    program: StepProgram, x: Tensor, y: Tensor, route: RouteRows, layer: tuple[int, int]
) -> ApartSum:
    """Append that rows ``x`` are submitted to a pool of threads, which write ``y`` ``[R, C]``.

    Args:
        program: to append to.
        x: rows, unchanged until they are collected.
        y: sums over the pool's experts.
        route: from :func:`append_route`.
        layer: addresses of the pool, and of what :func:`host_layer` returned.
    """
    pool, host = layer
    rows = ApartRows(
        pool=pool,
        layer=host,
        x=x.data_ptr(),
        chosen=route.chosen,
        weight=route.weight,
        y=y.data_ptr(),
    )
    program.append(Kind.SUBMIT, rows)
    return ApartSum(y, lambda: program.append(Kind.COLLECT, rows))


def _append_products(
    program: StepProgram, hidden: int, route: RouteRows, experts: RowExperts
) -> tuple[GatherRows, Tensor]:
    """Append the products of experts; return where their rows come from, and the results."""
    features, slots = _features(experts), program.most_rows * route.count

    def rows(name: str, columns: int) -> Tensor:
        return program.buffer(name, columns, rows=slots)

    gathered = rows("gathered", hidden)
    made = rows("gate and up of experts", (1 + experts.has_gate) * features)
    up = _products(program, gathered, made, experts.ups, gathered=True)
    here = None if all(experts.here) else torch.tensor(experts.here, dtype=torch.uint8)
    gather = GatherRows(
        route=addressof(route),
        y=gathered.data_ptr(),
        columns=hidden,
        prepared=up.prepared,
        here=None if here is None else program.keep(here),
    )
    program.append(Kind.GATHER, gather)
    program.append(Kind.EXPERTS, up)
    activated, found = rows("activated", features), rows("found", hidden)
    down = _products(program, activated, found, experts.downs)
    gated = _gate(made, activated, experts)
    program.append(Kind.ACTIVATE, ActivateSlots(gate=gated, prepared=down.prepared))
    program.append(Kind.EXPERTS, down)
    return gather, found


def _limit_rows(program: StepProgram, experts: int, choices: int, hidden: int) -> None:
    """Limit the rows of a program to what their choices leave room for."""
    if experts > _MOST_EXPERTS or choices > _MOST_CHOICES or hidden % 16:
        raise UnsupportedStepError(f"{choices} of {experts} experts")
    program.most_rows = min(program.most_rows, STEP_SLOTS // choices)


def _gate(made: Tensor, y: Tensor, experts: RowExperts) -> GateRows:
    activation = experts.activation
    if isinstance(activation, str):
        gate, up = made.chunk(2, dim=1) if experts.has_gate else (made, None)
        return gate_rows(gate, up, y, activation)
    return GateRows(
        gate=made.data_ptr(),
        y=y.data_ptr(),
        gate_row=made.stride(0),
        y_row=y.stride(0),
        columns=y.shape[1],
        alpha=activation.alpha,
        limit=activation.limit,
        activation=len(ACTIVATIONS),
    )


def _features(experts: RowExperts) -> int:
    """Return F."""
    weight, _ = next(one for one in experts.downs if one is not None)
    features = weight.in_features if isinstance(weight, PreparedWeight) else weight.shape[1]
    if features % 16:
        raise UnsupportedStepError(f"experts of {features} features")
    return features


def append_route(program: StepProgram, x: Tensor, router: RowRouter) -> RouteRows:
    """Append the choice of experts for rows ``x`` ``[R, C]``.

    Raises:
        UnsupportedStepError: too many experts.
    """
    _limit_rows(program, len(router.weight), router.count, x.shape[1])
    dtype = program.dtype if router.rounds_logits else torch.float32
    logits = program.buffer("logits", len(router.weight), dtype)
    program.products(x, [(logits, router.weight, router.bias)])
    correction = router.correction
    route = RouteRows(
        logits=logits.data_ptr(),
        correction=None if correction is None else program.keep(correction),
        chosen=program.buffer("chosen", router.count, torch.int32).data_ptr(),
        weight=program.buffer("weights of experts", router.count, torch.float32).data_ptr(),
        experts=len(router.weight),
        count=router.count,
        factor=router.factor,
        jitter=router.jitter,
        score=SCORES.index(router.score),
        normalizes=router.normalizes,
        type=TYPES[dtype],
        rounds=TYPES[program.dtype if router.rounds_weights else torch.float32],
    )
    program.append(Kind.ROUTE, route)
    program.margins.append(lambda rows: router.margins(logits[:rows].float()))
    return route


def _products(
    program: StepProgram,
    x: Tensor,
    y: Tensor,
    matrices: Sequence[ExpertMatrix | None],
    *,
    gathered: bool = False,
) -> ExpertProducts:
    kernels = {program.kernel_of(one[0]) for one in matrices if one is not None}
    if len(kernels) > 1:
        raise UnsupportedStepError("experts with different kernels")
    kernel = kernels.pop()
    handles, biases = [0] * len(matrices), [0] * len(matrices)
    for place, one in enumerate(matrices):
        if one is not None:
            weight, bias = one
            handles[place] = program.handle_of(weight, y.shape[1], x.shape[1])
            biases[place] = 0 if bias is None else program.keep(bias.to(program.dtype))
    prepared = program.prepared(x, kernel)
    return ExpertProducts(
        weights=program.keep(torch.tensor(handles)),
        biases=program.keep(torch.tensor(biases)) if any(biases) else None,
        x=x.data_ptr(),
        y=y.data_ptr(),
        prepared=None if prepared is None else program.keep(prepared),
        few_limit=kernel.few_limit,
        kernel=kernel.number,
        in_float=kernel.in_float,
        gathered=gathered,
    )


class HostPool:
    """Threads of this process that compute experts in host memory.

    Args:
        threads: their number.
        cores: that they are kept on, one each, where the host allows it; none: on any.

    Attributes:
        threads: their number.

    Raises:
        UnsupportedStepError: there is no compiled step here.
    """

    def __init__(self, threads: int, cores: Sequence[int] = ()) -> None:
        loaded = library()
        if loaded is None or not has_steps(instruction_set()):
            raise UnsupportedStepError("experts have no compiled kernels here")
        pinned = (c_int32 * threads)(*cores) if len(cores) == threads else None
        self._library = loaded
        self._handle: int | None = loaded.kernels_experts_open(pinned, threads)
        if self._handle is None:
            raise UnsupportedStepError(f"found no {threads} threads for experts")
        self.threads = threads
        self._programs: dict[torch.dtype, StepProgram] = {}  # whose buffers all layers use
        self._kept: list[StepProgram] = []

    def layer(
        self, dtype: torch.dtype, hidden_size: int, choices: int, experts: RowExperts
    ) -> HostLayer:
        """Return experts as the threads compute them; see :func:`host_layer`."""
        shared = self._programs.setdefault(dtype, StepProgram(dtype))
        program = StepProgram(dtype, shares=shared)
        self._kept.append(program)
        return host_layer(program, hidden_size, choices, experts)

    def submit(
        self, layer: HostLayer, rows: tuple[Tensor, Tensor, Tensor], y: Tensor
    ) -> Callable[[], None]:
        """Begin to compute the experts' sum ``y`` ``[R, C]`` of rows; all tensors are contiguous.

        Args:
            layer: from :meth:`layer`.
            rows: x ``[R, C]``, experts int32 ``[R, k]`` and their weights float32 ``[R, k]``.
            y: of the dtype of x.

        Returns:
            Waits until ``y`` is there.
        """
        handle, (x, chosen, weights) = self.handle, rows
        assert chosen.dtype == torch.int32
        assert weights.dtype == torch.float32
        assert all(one.is_contiguous() for one in (*rows, y))
        pointers = (one.data_ptr() for one in (x, chosen, weights, y))
        ticket = self._library.kernels_experts_submit(handle, byref(layer), *pointers, len(x))

        def wait(_: object = (*rows, y)) -> None:  # which live until then
            self._library.kernels_experts_wait(handle, ticket)

        return wait

    @property
    def handle(self) -> int:
        """Address of the threads."""
        assert self._handle is not None, "the pool is closed"
        return self._handle

    @property
    def busy(self) -> tuple[float, int]:
        """Seconds that the threads have computed, and the number of jobs."""
        seconds, jobs = c_double(), c_int64()
        self._library.kernels_experts_busy(self.handle, byref(seconds), byref(jobs))
        return seconds.value, jobs.value

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that all layers use."""
        return sum(program.buffer_bytes for program in self._programs.values())

    def close(self) -> None:
        """End the threads once they have computed what was submitted; later calls do nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._library.kernels_experts_close(handle)
