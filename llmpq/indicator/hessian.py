"""The rival: the top eigenvalue of each operator's Hessian times the error of its weights.

HAWQ as LLM-PQ, Sec. 4.2, quotes it: ``omega = lambda_max(H) ||Q(W) - W||^2``, with ``H = 2 X X^T``
the Hessian of ``||W X - Q(W) X||^2`` by a row of ``W``. The published code takes the eigenvalue of
another matrix. Every distinct input has a matrix as large as a weight; those of a layer are
collected in as many passes as it takes to hold less of them at once than the layer itself weighs.

Shape legend: K input features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from llmpq.calibration import Hessian as SecondMoments
from llmpq.calibration import LayerWalk, WalkedLayer
from llmpq.indicator.base import Progress, Scores, Subject
from llmpq.indicator.rounding import squared_error


@dataclass(frozen=True, slots=True, kw_only=True)
class HessianEigenvalue:
    """Sum of ``lambda_max(2 X X^T) ||Q(W) - W||^2`` over the operators of a layer.

    Attributes:
        iterations: of the power method, at most.
        tolerance: relative change of the eigenvalue at which it stops.
        memory_share: bytes of matrices held at once, as a share of the layer's weights; a single
            matrix may be larger.
    """

    iterations: int = 100
    tolerance: float = 1e-6
    memory_share: float = 0.75

    def score(self, subject: Subject, progress: Progress | None = None) -> Scores:
        """Sum over the operators of every layer."""
        walk = LayerWalk(
            subject.model_dir,
            subject.tokens_for("hessian"),
            dtype=subject.dtype,
            device=subject.device,
            batch_tokens=subject.batch_tokens,
            progress=progress,
        )
        rows = []
        for layer in walk:
            rows.append(self._layer(layer, subject))
            del layer  # before the walk loads the next
        return {width: tuple(row[width] for row in rows) for width in subject.bits}

    def _layer(self, layer: WalkedLayer, subject: Subject) -> dict[int, float]:
        row = dict.fromkeys(subject.bits, 0.0)
        groups = list(self._groups(layer))
        for number, names in enumerate(groups, start=1):
            eigenvalues = self._eigenvalues(layer, subject, names, advance=number == len(groups))
            for name, eigenvalue in eigenvalues.items():
                weight = layer.operators[name].weight
                for width in row:
                    row[width] += eigenvalue * squared_error(weight, width, subject.dtype)
        return row

    def _eigenvalues(
        self, layer: WalkedLayer, subject: Subject, names: list[str], *, advance: bool
    ) -> dict[str, float]:
        """Return ``lambda_max(2 X X^T)`` of every operator; the matrices are gone afterwards."""
        seen = layer.collect(partial(SecondMoments, device=subject.device), names, advance=advance)
        known: dict[int, float] = {}  # by collector: q, k and v share one
        for moments in seen.values():
            if id(moments) not in known:
                known[id(moments)] = 2 * self._eigenvalue(moments.matrix)
        return {name: known[id(moments)] for name, moments in seen.items()}

    def _eigenvalue(self, matrix: Tensor) -> float:
        return top_eigenvalue(matrix, iterations=self.iterations, tolerance=self.tolerance)

    def _groups(self, layer: WalkedLayer) -> Iterator[list[str]]:
        """Cut the operators, in order of running, into groups whose matrices fit the memory."""
        weights = sum(operator.weight.nbytes for operator in layer.operators.values())
        budget = self.memory_share * weights
        group: list[str] = []
        held: dict[str, int] = {}  # bytes by the first reader of an input
        for name in (name for step in layer.steps for name in step):
            size = 4 * layer.operators[name].in_features ** 2  # float32
            extra = 0 if layer.reader(name) in held else size
            if group and sum(held.values()) + extra > budget:
                yield group
                group, held = [], {}
            held[layer.reader(name)] = size
            group.append(name)
        yield group


def top_eigenvalue(matrix: Tensor, *, iterations: int = 100, tolerance: float = 1e-6) -> float:
    """Return the largest eigenvalue of a positive semidefinite matrix by the power method.

    Args:
        matrix: ``[K, K]``, symmetric.
        iterations: at most.
        tolerance: relative change at which it stops.

    Returns:
        The Rayleigh quotient, which is never above the eigenvalue; 0 for a matrix of zeros.
    """
    # A vector of ones would be blind to eigenvectors whose entries sum to zero.
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(len(matrix), generator=generator).to(matrix)  # [K]
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
