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
    scale = np.sqrt(np.maximum((matrix**2).sum(axis=0), np.finfo(float).tiny))
    scaled = matrix / scale
    gram = scaled.T @ scaled + _JITTER * np.eye(matrix.shape[1])
    pull = scaled.T @ target
    found = np.zeros(matrix.shape[1])
    active = np.zeros(matrix.shape[1], dtype=bool)
    for _ in range(3 * matrix.shape[1]):
        gradient = np.where(active, -np.inf, pull - gram @ found)
        entering = int(np.argmax(gradient))
        if gradient[entering] <= _TOLERANCE * max(1.0, float(np.abs(pull).max())):
            break
        active[entering] = True
        found, active = _settle(gram, pull, found, active)
    solution: Array = found / scale
    return solution


def _settle(
    gram: Array, pull: Array, found: Array, active: npt.NDArray[np.bool_]
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Move to the least-squares point of the active columns, dropping those that turn negative."""
    while active.any():
        wanted = np.zeros(len(pull))
        wanted[active] = np.linalg.solve(gram[np.ix_(active, active)], pull[active])
        negative = active & (wanted <= 0.0)
        if not negative.any():
            return wanted, active
        steps = found[negative] / np.maximum(found[negative] - wanted[negative], _JITTER**2)
        found = found + float(steps.min()) * (wanted - found)
        active = active & (found > _TOLERANCE**1.5) & ~(negative & (found <= _TOLERANCE))
        found = np.where(active, found, 0.0)
    return np.zeros(len(pull)), active
