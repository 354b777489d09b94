"""Seconds of one iteration of a whole model, from a table of measured iterations.

They follow the law of layers (``llmpq.costmodel.tables.latency``), over the running requests and
the tokens of each: the padded length in prefill, the mean and the longest in decode. Whole
iterations count, with the overhead that computation, preparation and sampling leave out (scheduler,
output processing; 16 to 38 % of decode in the published tables).
"""

from __future__ import annotations

import gzip
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llmpq.costmodel.tables.latency import Curve
from llmpq.costmodel.tables.law import Samples
from llmpq.errors import SpecError, bad_field
from llmpq.spec.fields import decode_text
from llmpq.spec.precision import Phase

Array = npt.NDArray[np.float64]

COLUMNS = (
    "is_prefill", "num_seqs", "total_tokens", "max_seqlen",
    "iter_ms", "exec_ms", "sample_ms", "prep_ms",
)  # fmt: skip
"""Columns that are read; others may be there."""
WARM_UP_ROWS = 2
"""First rows of a table, slower than all later ones of their shape."""
_MS = 1e-3
PER_OCTAVE = 32
"""Cells between a size and its double. Shapes of one cell count as repetitions, by their median."""


@dataclass(frozen=True, kw_only=True, eq=False)
class IterationTable:
    """Measured iterations of one model on one set of devices, one row each.

    Attributes:
        is_prefill: whether the iteration is a prefill, else a decode iteration [n].
        batch: running requests ``B`` [n].
        tokens: total length ``S`` of the requests [n].
        longest: longest of them ``s`` [n].
        seconds: whole iteration [n].
        parts: computation, preparation and sampling in seconds [3, n].
    """

    is_prefill: npt.NDArray[np.bool_]
    batch: Array
    tokens: Array
    longest: Array
    seconds: Array
    parts: Array

    def select(self, rows: npt.NDArray[np.bool_]) -> IterationTable:
        """Return the chosen rows."""
        return IterationTable(
            is_prefill=self.is_prefill[rows],
            batch=self.batch[rows],
            tokens=self.tokens[rows],
            longest=self.longest[rows],
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
        seconds=columns["iter_ms"] * _MS,
        parts=np.stack([columns[name] for name in ("exec_ms", "prep_ms", "sample_ms")]) * _MS,
    )


class IterationModel:
    """Seconds of prefill and decode iterations, fitted to a table.

    Args:
        table: measured iterations.

    Raises:
        SpecError: the table has no prefill or no decode iterations.
    """

    def __init__(self, table: IterationTable) -> None:
        self._curves = {phase: Curve(_samples(table, phase)) for phase in Phase}

    def seconds(
        self, phase: Phase, batch: float, tokens: float, longest: float | None = None
    ) -> float:
        """Return the seconds of an iteration.

        Args:
            phase: of the iteration.
            batch: running requests, at least 1.
            tokens: padded length in prefill, mean length in decode; at least 1.
            longest: longest request; by default all have equally many tokens.
        """
        return self._curves[phase].seconds(batch, tokens, longest)


def shapes_of(table: IterationTable, phase: Phase) -> tuple[Array, npt.NDArray[np.intp]]:
    """Return batch, tokens and longest of iterations of one phase [3, n], and the cell of each."""
    tokens = table.longest if phase is Phase.PREFILL else table.tokens / table.batch
    tokens = np.maximum(tokens, 1.0)
    shapes = np.stack([table.batch, tokens, np.maximum(table.longest, tokens)])
    _, cells = np.unique(np.round(PER_OCTAVE * np.log2(shapes)), axis=1, return_inverse=True)
    return shapes, cells


def _samples(table: IterationTable, phase: Phase) -> Samples:
    """Return one sample for each cell of shapes: the medians of its iterations."""
    own = table.select(table.is_prefill == (phase is Phase.PREFILL))
    if not own.batch.size:
        raise SpecError(f"iteration table: found no {phase.value} iterations, expected some")
    shapes, cells = shapes_of(own, phase)
    points = np.concatenate([shapes, own.seconds[None]])
    medians = [np.median(points[:, cells == cell], axis=1) for cell in range(cells.max() + 1)]
    batch, tokens, longest, seconds = np.stack(medians, axis=1)
    return Samples(phase=phase, batch=batch, tokens=tokens, longest=longest, seconds=seconds)
