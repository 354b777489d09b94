"""Non-negative least squares by the active-set method of Lawson and Hanson, in numpy alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_TOLERANCE = 1e-10
_JITTER = 1e-12
"""Added to the diagonal of the scaled Gram matrix, so that equal columns have a solution."""


def fit_relative(features: Array, seconds: Array) -> Array:
    """Return coefficients ``c >= 0`` that minimise ``sum ((features c - seconds) / seconds)^2``.

    Costs add up, so a negative coefficient is noise. ``features`` is ``[samples, features]``, none
    negative, and all ``seconds`` are positive.
    """
    return solve_nnls(features / seconds[:, None], np.ones(len(seconds)))


def solve_nnls(matrix: Array, target: Array) -> Array:
    """Return ``x >= 0`` that minimises ``|matrix x - target|``, all finite.

    Where several columns explain the target equally well, the leftmost is taken.
    """
    # Columns are scaled first: squaring large and tiny ones would cost the tiny ones their digits.
    scale = np.sqrt(np.maximum((matrix**2).sum(axis=0), np.finfo(float).tiny))
    scaled = matrix / scale
    gram = scaled.T @ scaled + _JITTER * np.eye(len(scale))
    pull = scaled.T @ target
    found = np.zeros(len(scale))
    active = np.zeros(len(scale), dtype=bool)
    least = _TOLERANCE * max(1.0, float(np.abs(pull).max()))
    for _ in range(3 * len(scale)):
        gradient = np.where(active, -np.inf, pull - gram @ found)
        # Rounding must not decide between columns that are equally good.
        entering = int(np.argmax(gradient >= gradient.max() * (1.0 - _TOLERANCE)))
        if gradient[entering] <= least:
            break
        active[entering] = True
        found, active = _solve_active(gram, pull, found, active)
    if active.any():  # without the digits that the Gram matrix cost
        exact = np.linalg.lstsq(scaled[:, active], target, rcond=None)[0]
        found[active] = exact if exact.min() > 0.0 else found[active]
    solution: Array = found / scale
    return solution


def _solve_active(
    gram: Array, pull: Array, found: Array, active: npt.NDArray[np.bool_]
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Move to the least-squares point of the active columns; drop those that become negative."""
    while len(index := active.nonzero()[0]):
        wanted = np.zeros(len(pull))
        wanted[index] = np.linalg.solve(gram[index[:, None], index], pull[index])
        if wanted[index].min() > 0.0:
            return wanted, active
        negative = active & (wanted <= 0.0)
        steps = found[negative] / np.maximum(found[negative] - wanted[negative], _JITTER**2)
        found = found + float(steps.min()) * (wanted - found)
        active = active & (found > _TOLERANCE**1.5) & ~(negative & (found <= _TOLERANCE))
        found = np.where(active, found, 0.0)
    return np.zeros(len(pull)), active
