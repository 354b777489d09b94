"""Least squares with weights that make errors relative and coefficients that are never negative.

Costs add up: a negative coefficient is noise, and it makes extrapolation absurd. With a handful of
features the non-negative optimum is found exactly by trying every subset of them.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

MAX_FEATURES = 8
_TIE = 1e-9


def fit_relative(features: Array, seconds: Array) -> Array:
    """Return coefficients ``c >= 0`` that minimise ``sum ((features c - seconds) / seconds)^2``.

    Where several fit equally well (fewer samples than features), the fewest features win, and among
    those the leftmost columns.

    Args:
        features: ``[samples, features]``, none negative, at most 8 columns.
        seconds: ``[samples]``, all positive.
    """
    count = features.shape[1]
    if count > MAX_FEATURES:
        raise ValueError(f"fit_relative: {count} features, expected at most {MAX_FEATURES}")
    rows = features / seconds[:, None]
    scale = np.maximum(rows.max(axis=0), np.finfo(float).tiny)
    rows = rows / scale
    best = np.zeros(count)
    best_error = float(len(seconds))
    for size in range(1, count + 1):
        for subset in combinations(range(count), size):
            columns = rows[:, subset]
            found = np.linalg.lstsq(columns, np.ones(len(seconds)), rcond=None)[0]
            error = float(((columns @ found - 1.0) ** 2).sum())
            if found.min() >= 0 and error < best_error - _TIE * len(seconds):
                best_error = error
                best = np.zeros(count)
                best[list(subset)] = found
    coefficients: Array = best / scale
    return coefficients
