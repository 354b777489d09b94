"""Journal: writes every timing to disk at once, so that an interrupted run can be resumed.

CSV with the header of :data:`HEADER` after ``# key: value`` lines that state what was measured.
A run can resume a journal only if these lines equal its own.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from llmpq.errors import SpecError, bad_field
from llmpq.profiler.bench import TimedStep, Timing
from llmpq.profiler.grid import Shape
from llmpq.spec.precision import Phase

HEADER = ("phase", "bits", "batch", "tokens", "layers", "seconds")
Identity = Sequence[tuple[str, str]]


def journal_file(table: Path) -> Path:
    """Return the file that keeps the timings of a table until it is written."""
    return table.with_name(table.name + ".part")


class Journal:
    """An open journal of ``identity``; without ``resume`` earlier timings are overwritten.

    Raises:
        SpecError: the earlier run measured something else, or the file is not a journal.
    """

    def __init__(self, path: Path, identity: Identity, *, resume: bool) -> None:
        self._path = path
        self.timings: list[Timing] = []
        if resume and path.exists():
            self.timings = read_journal(path, identity)
        lines = [f"# {key}: {value}" for key, value in identity]
        text = "\n".join([*lines, ",".join(HEADER), ""])
        self._file = path.open("w", encoding="utf-8")
        self._file.write(text)
        self.add(self.timings)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, timings: Iterable[Timing]) -> None:
        """Write timings and flush."""
        for one in timings:
            trial = one.trial
            shape = trial.shape
            cells = (
                shape.phase.value,
                trial.bits,
                shape.batch,
                shape.tokens,
                trial.layers,
                repr(one.seconds),
            )
            self._file.write(",".join(str(cell) for cell in cells) + "\n")
        self._file.flush()

    def remove(self) -> None:
        """Delete the file, once the table is written."""
        self._path.unlink(missing_ok=True)


def read_journal(path: Path, identity: Identity) -> list[Timing]:
    """Read the timings of an interrupted run; an incomplete last line is skipped."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    stated = [line[1:].partition(":") for line in lines if line.startswith("#")]
    found = {key.strip(): value.strip() for key, _, value in stated}
    for key, value in identity:
        if found.get(key) != value:
            raise SpecError(
                f"{path}: field '{key}': found '{found.get(key)}', expected '{value}' as in this "
                "run; run without --resume to start again"
            )
    whole = [line for line in lines if line.endswith("\n") and not line.startswith("#")]
    rows = list(csv.reader(whole))
    if not rows or tuple(rows[0]) != HEADER:
        raise bad_field(str(path), "header", ",".join(rows[0]) if rows else "", ",".join(HEADER))
    return [_timing(path, row) for row in rows[1:]]


def _timing(path: Path, row: list[str]) -> Timing:
    try:
        phase, bits, batch, tokens, layers, seconds = row
        shape = Shape(phase=Phase(phase), batch=int(batch), tokens=int(tokens))
        trial = TimedStep(shape=shape, bits=int(bits), layers=int(layers))
        return Timing(trial=trial, seconds=float(seconds))
    except ValueError:
        raise bad_field(str(path), "row", ",".join(row), ",".join(HEADER)) from None
