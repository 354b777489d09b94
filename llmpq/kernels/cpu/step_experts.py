"""Experts in a compiled step (``csrc/experts.h``): routing, products and weighted sums.

Shapes: R rows, C hidden size, E experts, k experts of a row, F features of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from llmpq.kernels.base import PreparedWeight
from llmpq.kernels.cpu.native import TYPES
from llmpq.kernels.cpu.step import (
    ACTIVATIONS,
    StepKernel,
    StepProgram,
    UnsupportedStepError,
    gate_rows,
)
from llmpq.kernels.cpu.step_structures import (
    ActivateSlots,
    CombineRows,
    ExpertProducts,
    GateRows,
    GatherRows,
    Kind,
    RouteRows,
)
from llmpq.spec.runtime_constants import STEP_SLOTS

Score = Literal["softmax", "sigmoid", "sparse mixer"]
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
        score: of a logit: its share in a softmax of all, its sigmoid, or its share in a softmax of
            those near it that were not chosen before (``sparsemixer`` of Phi-3.5-MoE).
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowExperts:
    """Router, matrices and activation of the experts of a layer.

    Attributes:
        router: chooses among them.
        ups: of each expert: from C to 2 F features, gate and what it multiplies.
        downs: of each expert: from F to C.
        activation: of the gate, one of ``ACTIVATIONS``, or of gate and up.
        shared: buffer ``[R, C]`` that is added to their sum.
        shared_gate: buffer ``[R, 1]`` whose sigmoid multiplies ``shared``.
    """

    router: RowRouter
    ups: Sequence[ExpertMatrix]
    downs: Sequence[ExpertMatrix]
    activation: str | ClampedActivation
    shared: Tensor | None = None
    shared_gate: Tensor | None = None


def append_experts(program: StepProgram, x: Tensor, y: Tensor, experts: RowExperts) -> None:
    """Append what makes the experts' sum ``y`` ``[R, C]`` of rows ``x`` ``[R, C]``.

    Raises:
        UnsupportedStepError: too many experts, or weights that differ or have no kernel.
    """
    router, features = experts.router, _features(experts)
    program.most_rows = min(program.most_rows, STEP_SLOTS // router.count)
    slots, hidden = program.most_rows * router.count, x.shape[1]
    if len(router.weight) > _MOST_EXPERTS or router.count > _MOST_CHOICES or hidden % 16:
        raise UnsupportedStepError(f"{router.count} of {len(router.weight)} experts")
    route = _route(program, x, router)

    def rows(name: str, columns: int) -> Tensor:
        return program.buffer(name, columns, rows=slots)

    gathered, made = rows("gathered", hidden), rows("gate and up of experts", 2 * features)
    up = _products(program, gathered, made, experts.ups, gathered=True)
    gather = GatherRows(
        route=addressof(route),
        x=x.data_ptr(),
        y=gathered.data_ptr(),
        columns=hidden,
        prepared=up.prepared,
    )
    program.append(Kind.GATHER, gather)
    program.append(Kind.EXPERTS, up)
    activated, found = rows("activated", features), rows("found", hidden)
    down = _products(program, activated, found, experts.downs)
    gated = _gate(made, activated, experts.activation)
    program.append(Kind.ACTIVATE, ActivateSlots(gate=gated, prepared=down.prepared))
    program.append(Kind.EXPERTS, down)
    shared, shared_gate = experts.shared, experts.shared_gate
    combine = CombineRows(
        x=found.data_ptr(),
        weight=route.weight,
        y=y.data_ptr(),
        shared=None if shared is None else shared.data_ptr(),
        shared_gate=None if shared_gate is None else shared_gate.data_ptr(),
        columns=hidden,
        count=router.count,
    )
    program.append(Kind.COMBINE, combine)


def _gate(made: Tensor, y: Tensor, activation: str | ClampedActivation) -> GateRows:
    if isinstance(activation, str):
        gate, up = made.chunk(2, dim=1)
        return gate_rows(gate, up, y, activation)
    return GateRows(
        gate=made.data_ptr(),
        y=y.data_ptr(),
        gate_row=made.stride(0),
        columns=y.shape[1],
        alpha=activation.alpha,
        limit=activation.limit,
        activation=len(ACTIVATIONS),
    )


def _features(experts: RowExperts) -> int:
    """Return F."""
    weight, _ = experts.downs[0]
    features = weight.in_features if isinstance(weight, PreparedWeight) else weight.shape[1]
    if features % 16:
        raise UnsupportedStepError(f"experts of {features} features")
    return features


def _route(program: StepProgram, x: Tensor, router: RowRouter) -> RouteRows:
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
    matrices: Sequence[ExpertMatrix],
    *,
    gathered: bool = False,
) -> ExpertProducts:
    kernels: set[StepKernel] = {program.kernel_of(weight) for weight, _ in matrices}
    if len(kernels) > 1:
        raise UnsupportedStepError("experts with different kernels")
    kernel = kernels.pop()
    handles = [program.handle_of(weight, y.shape[1], x.shape[1]) for weight, _ in matrices]
    biases = [0 if bias is None else program.keep(bias.to(program.dtype)) for _, bias in matrices]
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
