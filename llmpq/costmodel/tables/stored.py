"""Stored: what fitting a curve found, as plain arrays, and back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmpq.costmodel.tables.bounds import Bounds
from llmpq.costmodel.tables.nnls import Array
from llmpq.costmodel.tables.residual import Residual, Scales
from llmpq.costmodel.tables.selection import Candidate, Choice
from llmpq.costmodel.tables.surface import Surface

Parts = tuple[Choice, float, Residual | None, Surface, Bounds]

_NO_HINGES, _BENT = -1.0, -2.0


def stored(
    choice: Choice, each: float, residual: Residual | None, surface: Surface, bounds: Bounds
) -> dict[str, Array]:
    """Return the parts of a curve as arrays."""
    members = [(one.power, _kind(one), one.strip or 0) for one in choice.candidates]
    arrays = surface.arrays() | {
        "figures": np.array([each, choice.power, choice.deviation]),
        "members": np.column_stack([np.array(members, dtype=float), np.array(choice.shares)]),
        "bounds": np.stack([bounds.batch, bounds.tokens, bounds.seconds]),
    }
    if residual is not None:
        one = residual.scales
        reach = [one.shape_octaves, one.row_octaves, one.row_weight, one.noise, residual.variance]
        columns = [residual.points, residual.weights, residual.noise]
        arrays |= {"residual": np.column_stack(columns), "scales": np.array(reach)}
    return arrays


def _kind(one: Candidate) -> float:
    """Return a candidate's kind as a number: its hinges, or one below 0."""
    if one.is_bent:
        return _BENT
    return _NO_HINGES if one.hinges is None else float(one.hinges)


def restored(arrays: Mapping[str, Array]) -> Parts:
    """Return the parts of a curve that ``stored`` made arrays of."""
    each, power, deviation = arrays["figures"].tolist()
    choice = Choice(
        candidates=tuple(
            Candidate(
                power=power,
                hinges=int(kind) if kind >= 0.0 else None,
                is_bent=kind == _BENT,
                strip=int(strip) or None,
            )
            for power, kind, strip, _ in arrays["members"].tolist()
        ),
        shares=tuple(arrays["members"][:, 3].tolist()),
        power=power,
        deviation=deviation,
    )
    batch, tokens, seconds = arrays["bounds"]
    bounds = Bounds(batch=batch, tokens=tokens, seconds=seconds)
    return choice, each, _residual(arrays), Surface.restored(arrays), bounds


def _residual(arrays: Mapping[str, Array]) -> Residual | None:
    if "residual" not in arrays:
        return None
    shape_octaves, row_octaves, row_weight, noise, variance = arrays["scales"].tolist()
    columns = arrays["residual"]
    return Residual(
        points=columns[:, :2],
        weights=columns[:, 2],
        noise=columns[:, 3],
        variance=variance,
        scales=Scales(
            shape_octaves=shape_octaves, row_octaves=row_octaves, row_weight=row_weight, noise=noise
        ),
    )
