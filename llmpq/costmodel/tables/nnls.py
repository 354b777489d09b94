"""Non-negative least squares with many columns (Lawson and Hanson's active set).

``fit_relative`` tries every subset of a handful of features; a law with a hinge at every measured
size has dozens, for which this is the exact and fast way. No dependency beyond numpy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_TOLERANCE = 1e-10
_JITTER = 1e-12
"""Added to the diagonal of a scaled Gram matrix, so that equal columns have an answer."""


def solve_nnls(matrix: Array, target: Array) -> Array:
    """Return ``x >= 0`` that minimises ``|matrix x - target|``.

    Args:
        matrix: ``[rows, columns]``, finite.
        target: ``[rows]``, finite.
    """
    # Scaled first: squaring large and tiny columns would cost the tiny ones their digits.
    scale = np.sqrt(np.maximum((matrix**2).sum(axis=0), np.finfo(float).tiny))
    scaled = matrix / scale
    solution: Array = solve_gram(scaled.T @ scaled, scaled.T @ target) / scale
    return solution


def solve_gram(gram: Array, pull: Array, start: Array | None = None) -> Array:
    """Return the ``x >= 0`` of the same problem from its normal equations.

    Args:
        gram: ``matrix' matrix``, ``[columns, columns]``.
        pull: ``matrix' target``, ``[columns]``.
        start: a feasible guess ``[columns]``, such as the answer to a neighbouring problem.
    """
    size = len(pull)
    scale = np.sqrt(np.maximum(gram.diagonal(), np.finfo(float).tiny))
    gram = gram / np.outer(scale, scale) + _JITTER * np.eye(size)
    pull = pull / scale
    found = np.zeros(size) if start is None else start * scale
    active = found > 0.0
    found, active = _settle(gram, pull, found, active)
    least = _TOLERANCE * max(1.0, float(np.abs(pull).max()))
    for _ in range(3 * size):
        gradient = pull - gram @ found
        gradient[active] = -np.inf
        entering = int(gradient.argmax())
        if gradient[entering] <= least:
            break
        active[entering] = True
        found, active = _settle(gram, pull, found, active)
    solution: Array = found / scale
    return solution


def _settle(
    gram: Array, pull: Array, found: Array, active: npt.NDArray[np.bool_]
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Move to the least-squares point of the active columns, dropping those that turn negative."""
    while len(index := active.nonzero()[0]):
        inner = np.linalg.solve(gram[index[:, None], index], pull[index])
        if inner.min() > 0.0:
            settled = np.zeros(len(pull))
            settled[index] = inner
            return settled, active
        wanted = np.zeros(len(pull))
        wanted[index] = inner
        negative = active & (wanted <= 0.0)
        steps = found[negative] / np.maximum(found[negative] - wanted[negative], _JITTER**2)
        found = found + float(steps.min()) * (wanted - found)
        active = active & (found > _TOLERANCE**1.5) & ~(negative & (found <= _TOLERANCE))
        found = np.where(active, found, 0.0)
    return np.zeros(len(pull)), active
