"""The rival: the top eigenvalue of each operator's Hessian times the error of its weights.

HAWQ as LLM-PQ, Sec. 4.2, quotes it: ``omega = lambda_max(H) ||Q(W) - W||^2``, with ``H = 2 X X^T``
the Hessian of ``||W X - Q(W) X||^2`` by a row of ``W``. The published code takes the eigenvalue of
another matrix. Every distinct input has a matrix as large as a weight: half of it is held
(``gram.py``), and those of a layer are collected in as many passes as it takes to hold few at once.

Shape legend: K input features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from llmpq.calibration import LayerWalk, WalkedLayer
from llmpq.indicator.base import Progress, Scores, Subject
from llmpq.indicator.gram import UpperGram
from llmpq.indicator.rounding import squared_error


@dataclass(frozen=True, slots=True, kw_only=True)
class HessianEigenvalue:
    """Sum of ``lambda_max(2 X X^T) ||Q(W) - W||^2`` over the operators of a layer.

    Attributes:
        iterations: of the power method, at most.
        tolerance: relative change of the eigenvalue at which it stops.
        memory_share: bytes of matrices held at once, as a share of the layer's weights: what
            runs inside a layer needs room too. A single matrix may be larger; it is collected while
            the weights that it belongs to are away.
    """

    iterations: int = 100
    tolerance: float = 1e-6
    memory_share: float = 1 / 3

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
        weights = sum(operator.weight.nbytes for operator in layer.operators.values())
        budget = int(self.memory_share * weights)
        groups = list(_groups(layer, budget))
        alone = [
            names for names in groups if _bytes_of(layer, names) > budget and layer.can_free(names)
        ]
        others = [names for names in groups if names not in alone]
        for names in alone:
            errors = _errors(layer, names, subject)
            with layer.freed(names):
                eigenvalues = self._eigenvalues(layer, subject, names, advance=False)
            _add(row, eigenvalues, errors)
        for names in others:
            is_last = names is others[-1]
            eigenvalues = self._eigenvalues(layer, subject, names, advance=is_last)
            _add(row, eigenvalues, _errors(layer, names, subject))
        return row

    def _eigenvalues(
        self, layer: WalkedLayer, subject: Subject, names: list[str], *, advance: bool
    ) -> dict[str, float]:
        """Return ``lambda_max(2 X X^T)`` of every operator; the matrices are gone afterwards."""
        seen = layer.collect(partial(UpperGram, device=subject.device), names, advance=advance)
        known: dict[int, float] = {}  # by collector: q, k and v share one
        for gram in seen.values():
            if id(gram) not in known:
                known[id(gram)] = 2 * top_eigenvalue(
                    gram, iterations=self.iterations, tolerance=self.tolerance
                )
        return {name: known[id(gram)] for name, gram in seen.items()}


Errors = dict[tuple[str, int], float]
"""``||Q(W) - W||^2`` by operator and bitwidth."""


def _errors(layer: WalkedLayer, names: Sequence[str], subject: Subject) -> Errors:
    return {
        (name, width): squared_error(layer.operators[name].weight, width, subject.dtype)
        for name in names
        for width in subject.bits
    }


def _add(row: dict[int, float], eigenvalues: dict[str, float], errors: Errors) -> None:
    for (name, width), error in errors.items():
        row[width] += eigenvalues[name] * error


def _groups(layer: WalkedLayer, budget: int) -> Iterator[list[str]]:
    """Cut the operators, in order of running, into groups whose matrices fit ``budget`` bytes."""
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
        iterations: at most.
        tolerance: relative change at which it stops.

    Returns:
        The Rayleigh quotient, which is never above the eigenvalue; 0 for a matrix of zeros.
    """
    # A vector of ones would be blind to eigenvectors whose entries sum to zero.
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
