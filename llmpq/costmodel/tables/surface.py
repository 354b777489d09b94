"""Surface: logarithms of seconds on a grid of rows and tokens, monotone by construction.

The grid lies over rows (of the matrix products) and tokens. Both grow with batch and tokens, so a
surface that is monotone there is monotone in the shape; and a kernel's steps, which follow rows,
lie along one of its axes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from math import exp, log, log2

import numpy as np

from llmpq.costmodel.tables.laws import STEPS, TILES
from llmpq.costmodel.tables.nnls import Array

_STEP_OCTAVES = 0.25
"""Spacing of the grid where it was measured; twice that outside."""
_HEADROOM = 16.0
"""How far past the measured sizes the grid goes; further out seconds grow in proportion."""
_MAX_NODES = 64
_MAX_TILES = 64
"""Tiles whose edges get nodes; further out a step is under 1.6 %, and a grid that misses edges
answers half a step too much here and too little there."""
_LEAST_GAP = 1e-9

LogSeconds = Callable[[Array, Array], Array]


class Surface:
    """Seconds at any rows and tokens; positive, growing with both."""

    def __init__(
        self, rows: Array, tokens: Array, log_seconds: LogSeconds, strip: int | None = None
    ) -> None:
        """Lay ``log_seconds`` out over a grid around the samples' rows and tokens ``[P]``.

        Its nodes take in the edges of tiles, and of strips where there are any.
        """
        tiles = TILES if strip is None else (strip, *TILES)
        grid = np.array(_nodes(rows, tiles, STEPS)), np.array(_nodes(tokens))
        mesh = np.meshgrid(*grid, indexing="ij")
        values = log_seconds(mesh[0].ravel(), mesh[1].ravel())
        self._lay(*grid, _monotone(values.reshape(mesh[0].shape)))

    @classmethod
    def restored(cls, arrays: Mapping[str, Array]) -> Surface:
        """Return the surface that ``arrays`` describes."""
        found = cls.__new__(cls)
        found._lay(arrays["rows"], arrays["lengths"], arrays["nodes"])
        return found

    def arrays(self) -> dict[str, Array]:
        """Return the surface as arrays: its grid's rows, lengths and logarithms."""
        return {
            "rows": np.array(self._rows),
            "lengths": np.array(self._lengths),
            "nodes": np.array(self._nodes),
        }

    def _lay(self, rows: Array, lengths: Array, nodes: Array) -> None:
        self._rows: list[float] = rows.tolist()
        self._lengths: list[float] = lengths.tolist()
        self._nodes: list[list[float]] = nodes.tolist()

    def seconds(self, rows: float, tokens: float) -> float:
        """Return the seconds, ``rows`` and ``tokens`` at least 1."""
        row, row_share = _place(self._rows, rows)
        column, share = _place(self._lengths, tokens)
        low, high = self._nodes[row], self._nodes[row + 1]
        first = low[column] + share * (low[column + 1] - low[column])
        second = high[column] + share * (high[column + 1] - high[column])
        beyond = max(1.0, rows / self._rows[-1]) * max(1.0, tokens / self._lengths[-1])
        return exp(first + row_share * (second - first)) * beyond


def _monotone(grid: Array) -> Array:
    """Return a grid that grows along both axes.

    Midway between the running maximum and, from the far end, the running minimum: both are
    monotone, and where the values already are, both equal them.
    """
    upper = np.maximum.accumulate(np.maximum.accumulate(grid, axis=0), axis=1)
    lower = grid[::-1, ::-1]
    lower = np.minimum.accumulate(np.minimum.accumulate(lower, axis=0), axis=1)[::-1, ::-1]
    result: Array = (upper + lower) / 2.0
    return result


def _nodes(sizes: Array, tiles: Sequence[int] = (), steps: Sequence[int] = ()) -> list[float]:
    """Return a grid from 1 past the largest size: measured sizes, steps between, tiles' edges."""
    low, high = float(sizes.min()), float(sizes.max())
    measured = np.unique(sizes)
    if len(measured) > _MAX_NODES:
        measured = measured[np.linspace(0, len(measured) - 1, _MAX_NODES).astype(int)]
    parts = [measured, _spread(low, high, _STEP_OCTAVES)]
    parts += [_spread(1.0, low, 2 * _STEP_OCTAVES)]
    parts += [_spread(high, high * _HEADROOM, 2 * _STEP_OCTAVES)]
    edges = [np.arange(tile, min(high, _MAX_TILES * tile) + 1, tile) for tile in tiles]
    edges.append(np.array([step for step in steps if step <= high]))
    parts += [place + shift for place in edges for shift in (0.0, 1.0)]
    grid = np.unique(np.concatenate(parts))
    apart = np.concatenate([[True], np.diff(np.log(grid)) > _LEAST_GAP])
    nodes: list[float] = grid[apart].tolist()
    return nodes


def _spread(low: float, high: float, step_octaves: float) -> Array:
    """Return sizes from ``low`` to ``high``, evenly in octaves, at most a step apart."""
    count = 2 + int(max(0.0, log2(high / low)) / step_octaves)
    result: Array = np.geomspace(low, high, count)
    return result


def _place(nodes: list[float], size: float) -> tuple[int, float]:
    """Return the node below ``size`` and how far, in logarithms, it lies to the next one."""
    index = min(max(bisect_right(nodes, size) - 1, 0), len(nodes) - 2)
    low, high = nodes[index], nodes[index + 1]
    return index, min(max(log(size / low) / log(high / low), 0.0), 1.0)
