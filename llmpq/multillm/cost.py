"""Seconds of one iteration of a whole model, from a table of measured iterations.

SamuLLM, Eq. 5: for every number ``B`` of running requests, computation, preparation and sampling
are linear in FLOPs, ``B s`` and ``S``. For one ``B`` the FLOPs of a decode iteration are linear in
the total length ``S`` and those of prefill nearly so in the padded length ``B s``. Two forms:

- ``paper``: the sum of the three parts, each ``a[B] x + b[B]``;
- ``whole``: the whole iteration, with the overhead that the three parts leave out (scheduler,
  output processing; 16 to 38 % of decode in the published tables), as ``b[B] + a[B] x``. In decode
  ``x`` is ``(S, B s)``. Medians of repeated shapes and of the weights of neighbouring ``B`` remove
  single slow measurements.

Between measured ``B``, seconds are interpolated; beyond them they continue in proportion.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from llmpq.errors import SpecError, bad_field
from llmpq.spec.fields import decode_text
from llmpq.spec.precision import Phase

Array = npt.NDArray[np.float64]
Form = Literal["paper", "whole"]

COLUMNS = (
    "is_prefill", "num_seqs", "total_tokens", "max_seqlen", "tflop",
    "iter_ms", "exec_ms", "sample_ms", "prep_ms",
)  # fmt: skip
"""Columns that are read; others may be there."""
WARM_UP_ROWS = 2
"""First rows of a table, slower than all later ones of their shape."""
_MS = 1e-3
NEIGHBOURS = 2
"""Measured ``B`` on either side whose weights enter the median."""
_NEAR = 1.01
"""Shapes whose total lengths differ by less are repetitions."""


@dataclass(frozen=True, kw_only=True, eq=False)
class IterationTable:
    """Measured iterations of one model on one set of devices, one row each.

    Attributes:
        is_prefill: whether the iteration is a prefill, else a decode iteration [n].
        batch: running requests ``B`` [n].
        tokens: total length ``S`` of the requests [n].
        longest: longest of them ``s`` [n].
        tflop: work of the iteration in 10^12 operations [n].
        seconds: whole iteration [n].
        parts: computation, preparation and sampling in seconds [3, n].
    """

    is_prefill: npt.NDArray[np.bool_]
    batch: Array
    tokens: Array
    longest: Array
    tflop: Array
    seconds: Array
    parts: Array

    def select(self, rows: npt.NDArray[np.bool_]) -> IterationTable:
        """Return the chosen rows."""
        return IterationTable(
            is_prefill=self.is_prefill[rows],
            batch=self.batch[rows],
            tokens=self.tokens[rows],
            longest=self.longest[rows],
            tflop=self.tflop[rows],
            seconds=self.seconds[rows],
            parts=self.parts[:, rows],
        )


def read_iterations(path: str | Path) -> IterationTable:
    """Read a table in SamuLLM's layout, CSV or gzipped CSV with times in milliseconds.

    Raises:
        SpecError: the file cannot be read, lacks a column, or holds a value that is no number, is
            negative, or a duration of 0; names the file and the column.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError) as error:
        raise SpecError(f"{path}: cannot be read: {error}") from None
    text = decode_text(data, str(path))
    header = text.partition("\n")[0].strip().split(",")
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise bad_field(str(path), missing[0], header, "a column of that name")
    try:
        values = np.loadtxt(
            io.StringIO(text), delimiter=",", skiprows=1 + WARM_UP_ROWS, ndmin=2,
            usecols=[header.index(name) for name in COLUMNS],
        ).T  # fmt: skip
    except ValueError as error:
        raise SpecError(f"{path}: found a row that is not of numbers: {error}") from None
    if not values.size:
        raise SpecError(f"{path}: found no rows after {WARM_UP_ROWS} of warm-up, expected some")
    columns = dict(zip(COLUMNS, values, strict=True))
    for name, column in columns.items():
        least = 1.0 if name in ("num_seqs", "total_tokens", "max_seqlen") else 0.0
        bad = ~(np.isfinite(column) & (column >= least))
        if bad.any():
            raise bad_field(str(path), name, float(column[bad][0]), f"numbers from {least:g} on")
    if not columns["iter_ms"].all():
        raise bad_field(str(path), "iter_ms", 0.0, "a duration above 0")
    return IterationTable(
        is_prefill=columns["is_prefill"] > 0,
        batch=columns["num_seqs"],
        tokens=columns["total_tokens"],
        longest=columns["max_seqlen"],
        tflop=columns["tflop"],
        seconds=columns["iter_ms"] * _MS,
        parts=np.stack([columns[name] for name in ("exec_ms", "prep_ms", "sample_ms")]) * _MS,
    )


class IterationModel:
    """Seconds of prefill and decode iterations, fitted to a table.

    Args:
        table: measured iterations.
        form: of the fit; see the module.

    Raises:
        SpecError: the table has no prefill or no decode iterations.
    """

    def __init__(self, table: IterationTable, form: Form = "whole") -> None:
        self._laws = {
            phase: _law(table.select(table.is_prefill == (phase is Phase.PREFILL)), phase, form)
            for phase in Phase
        }

    def seconds(
        self, phase: Phase, batch: npt.ArrayLike, tokens: npt.ArrayLike, longest: npt.ArrayLike
    ) -> Array:
        """Return the seconds of iterations.

        Args:
            phase: of all of them.
            batch: running requests ``B`` [n].
            tokens: their total length ``S`` [n]; prefill is padded and does not depend on it.
            longest: longest request ``s`` [n].
        """
        sizes, total, most = (np.asarray(one, np.float64) for one in (batch, tokens, longest))
        inputs = np.stack([np.ones_like(total), total, sizes * most], axis=-1)
        found: Array = (self.weights(phase, sizes) * inputs).sum(-1)
        return found

    def weights(self, phase: Phase, batch: npt.ArrayLike) -> Array:
        """Return the weights of 1, ``S`` and ``B s`` in the seconds of iterations [n, 3].

        Args:
            phase: of all of them.
            batch: running requests ``B`` [n].
        """
        sizes = np.asarray(batch, np.float64)
        batches, weights = self._laws[phase]
        high = np.clip(np.searchsorted(batches, sizes), 0, len(batches) - 1)
        low = np.where(batches[high] > sizes, np.maximum(high - 1, 0), high)
        gap = np.maximum(batches[high] - batches[low], 1.0)
        share = np.clip((sizes - batches[low]) / gap, 0.0, 1.0)[..., None]
        found = weights[low] + (weights[high] - weights[low]) * share
        beyond: Array = found * np.maximum(1.0, sizes / batches[-1])[..., None]
        return beyond


def _law(table: IterationTable, phase: Phase, form: Form) -> tuple[Array, Array]:
    """Return the batches of a phase [m] and their weights of 1, ``S`` and ``B s`` [m, 3]."""
    if not table.batch.size:
        raise SpecError(f"iteration table: found no {phase.value} iterations, expected some")
    batches = np.unique(table.batch)
    fit = _paper_weights if form == "paper" else _whole_weights
    weights = np.stack([fit(table.select(table.batch == batch), phase) for batch in batches])
    return batches, weights if form == "paper" else _smoothed(weights)


def _smoothed(weights: Array) -> Array:
    """Return the median of every row's weights and its neighbours', as many on either side."""
    last = len(weights) - 1
    found = np.empty_like(weights)
    for place in range(last + 1):
        reach = min(NEIGHBOURS, place, last - place)
        found[place] = np.median(weights[place - reach : place + reach + 1], axis=0)
    return found


def _whole_weights(table: IterationTable, phase: Phase) -> Array:
    """Fit whole iterations of one batch size; errors count relative to the seconds."""
    padded = table.batch * table.longest
    points = _medians(np.stack([table.tokens, padded, table.seconds]))
    inputs = (2,) if phase is Phase.PREFILL else (1, 2)
    return _fit(points[0], points[1], points[2], inputs, is_relative=True)


def _paper_weights(table: IterationTable, phase: Phase) -> Array:
    """Fit the three parts of Eq. 5 by least squares, and add them."""
    padded = table.batch * table.longest
    compute, prepare, sample = table.parts
    work = (2,) if phase is Phase.PREFILL else (1,)
    found = _fit(table.tokens, padded, compute, work)
    found += _fit(table.tokens, padded, prepare, (2,))
    if phase is Phase.PREFILL:  # requests of one length: S is B s
        return found + _fit(table.tokens, padded, sample, (2,))
    return found + _fit(table.tokens, padded, sample, (1,))


def _fit(
    tokens: Array,
    padded: Array,
    seconds: Array,
    inputs: Sequence[int],
    *,
    is_relative: bool = False,
) -> Array:
    """Return non-negative weights [3] of 1, ``S`` and ``B s``; only ``inputs`` are used."""
    design = np.stack([np.ones_like(tokens), tokens, padded], axis=1)
    scale = 1.0 / seconds if is_relative else np.ones_like(seconds)
    chosen = [0, *inputs]
    while True:
        weights = np.zeros(3)
        shown = design[:, chosen]
        size = np.abs(shown).max(0)
        solved = np.linalg.lstsq(shown / size * scale[:, None], seconds * scale, rcond=None)[0]
        weights[chosen] = solved / size
        slopes = [one for one in chosen if one and weights[one] < 0]
        if not slopes:
            return weights
        chosen.remove(min(slopes, key=lambda one: weights[one]))


def _medians(points: Array) -> Array:
    """Return one point for repetitions: shapes of nearly one total and padded length [3, m]."""
    order = np.lexsort(points[1::-1])
    ratios = points[:2, order[1:]] / points[:2, order[:-1]]
    is_new = (np.maximum(ratios, 1.0 / ratios) > _NEAR).any(0)
    groups = np.split(order, np.nonzero(is_new)[0] + 1)
    found: Array = np.stack([np.median(points[:, group], axis=1) for group in groups], axis=1)
    return found
