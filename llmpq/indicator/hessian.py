"""The Hessian indicator: the top eigenvalue of each operator's Hessian times its weight error.

HAWQ as in LLM-PQ, Sec. 4.2: ``omega = lambda_max(H) ||Q(W) - W||^2``, with ``H = 2 X X^T`` the
Hessian of ``||W X - Q(W) X||^2`` for a row of ``W``. The published code uses the eigenvalue of
another matrix. Every distinct input has a matrix as large as a weight, so only the upper triangle
is stored, and the matrices of a layer are collected in several passes that fit a memory budget.

Shape legend: K input features, P rows of a panel, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from llmpq.calibration import WalkedLayer
from llmpq.calibration.walk import Progress
from llmpq.indicator.base import IndicatorInput, Scores
from llmpq.indicator.rounding import squared_error

PANEL_ROWS = 256
"""Rows of a panel: large for a fast product, small against K as its diagonal block is square."""


class UpperGram:
    """The symmetric matrix ``sum x x^T``, stored as row panels from the diagonal on.

    Args:
        in_features: K.
        device: device of the inputs.

    Attributes:
        tokens: number of inputs added.
        panels: float32, ``[P, K - first row]`` each.
    """

    dtype = torch.float32

    def __init__(self, in_features: int, device: torch.device | str = "cpu") -> None:
        self.tokens = 0
        self.device = torch.device(device)
        self.panels = [
            torch.zeros(min(PANEL_ROWS, in_features - first), in_features - first, device=device)
            for first in range(0, in_features, PANEL_ROWS)
        ]

    def __len__(self) -> int:
        return self.panels[0].shape[1]

    def add(self, inputs: Tensor) -> None:
        """Add inputs ``[T, K]``."""
        inputs = inputs.to(self.dtype)
        self.tokens += inputs.shape[0]
        for first, panel in zip(range(0, len(self), PANEL_ROWS), self.panels, strict=True):
            rest = inputs[:, first:]
            panel.addmm_(rest[:, : len(panel)].T, rest)

    def __matmul__(self, vector: Tensor) -> Tensor:
        """Return the product with a vector ``[K]``."""
        image = torch.zeros_like(vector)
        for first, panel in zip(range(0, len(self), PANEL_ROWS), self.panels, strict=True):
            rows = len(panel)
            image[first : first + rows] += panel @ vector[first:]
            image[first + rows :] += panel[:, rows:].T @ vector[first : first + rows]
        return image

    @staticmethod
    def bytes_for(in_features: int) -> int:
        """Return the bytes of the panels."""
        firsts = range(0, in_features, PANEL_ROWS)
        return 4 * sum(
            min(PANEL_ROWS, in_features - first) * (in_features - first) for first in firsts
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HessianEigenvalue:
    """Sum of ``lambda_max(2 X X^T) ||Q(W) - W||^2`` over the operators of a layer.

    Attributes:
        iterations: maximum iterations of the power method.
        tolerance: relative change of the eigenvalue at which the method stops.
        memory_share: maximum bytes of the matrices held at once, as a share of the layer's weights.
            A larger matrix is collected alone.
    """

    iterations: int = 100
    tolerance: float = 1e-6
    memory_share: float = 1 / 3

    def score(self, subject: IndicatorInput, progress: Progress | None = None) -> Scores:
        """Sum over the operators of every layer."""
        rows = []
        for layer in subject.walk("hessian", progress):
            rows.append(self._layer(layer, subject))
            del layer  # free it before the next one is loaded
        return {width: tuple(row[width] for row in rows) for width in subject.bits}

    def _layer(self, layer: WalkedLayer, subject: IndicatorInput) -> dict[int, float]:
        row = dict.fromkeys(subject.bits, 0.0)
        weights = sum(operator.weight.nbytes for operator in layer.operators.values())
        budget = int(self.memory_share * weights)
        for names in _groups(layer, budget):
            eigenvalues = self._eigenvalues(layer, subject, names)
            for name in names:
                weight = layer.operators[name].weight
                for width in subject.bits:
                    error = squared_error(weight, width, subject.dtype)
                    row[width] += eigenvalues[name] * error
        return row

    def _eigenvalues(
        self, layer: WalkedLayer, subject: IndicatorInput, names: list[str]
    ) -> dict[str, float]:
        """Return ``lambda_max(2 X X^T)`` of every operator."""
        seen = layer.collect(partial(UpperGram, device=subject.device), names)
        known: dict[int, float] = {}  # by matrix: q, k and v share one
        for gram in seen.values():
            if id(gram) not in known:
                known[id(gram)] = 2 * top_eigenvalue(
                    gram, iterations=self.iterations, tolerance=self.tolerance
                )
        return {name: known[id(gram)] for name, gram in seen.items()}


def _groups(layer: WalkedLayer, budget: int) -> Iterator[list[str]]:
    """Group the operators, in execution order, so that the matrices of a group fit ``budget``."""
    group: list[str] = []
    for name in (name for step in layer.steps for name in step):
        if group and _bytes_of(layer, [*group, name]) > max(budget, _bytes_of(layer, group)):
            yield group
            group = []
        group.append(name)
    yield group


def _bytes_of(layer: WalkedLayer, names: Sequence[str]) -> int:
    """Return the bytes of the matrices of all distinct inputs."""
    widths = {layer.reader(name): layer.operators[name].in_features for name in names}
    return sum(map(UpperGram.bytes_for, widths.values()))


def top_eigenvalue(
    matrix: Tensor | UpperGram, *, iterations: int = 100, tolerance: float = 1e-6
) -> float:
    """Return the largest eigenvalue of a positive semidefinite matrix by the power method.

    Args:
        matrix: ``[K, K]``, symmetric.
        iterations: maximum iterations.
        tolerance: relative change at which the method stops.

    Returns:
        The Rayleigh quotient, a lower bound of the eigenvalue; 0 for a matrix of zeros.
    """
    # A vector of ones is orthogonal to eigenvectors whose entries sum to zero.
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(len(matrix), generator=generator)  # [K]
    vector = vector.to(device=matrix.device, dtype=matrix.dtype)
    value = 0.0
    for _ in range(iterations):
        vector = vector / vector.norm()
        image = matrix @ vector
        before, value = value, float(vector @ image)
        if value <= 0:
            return 0.0
        if abs(value - before) <= tolerance * value:
            break
        vector = image
    return value
