"""Journal: every single timing on disk as it is made, so that an interrupted run can go on.

CSV with the header of :data:`HEADER` behind ``# key: value`` lines that
say what was measured. Those lines must equal the new run's own, or the old timings are refused.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from llmpq.errors import SpecError, bad_field
from llmpq.profiler.bench import Timing, Trial
from llmpq.profiler.grid import Shape
from llmpq.profiler.levels import Timed
from llmpq.spec.precision import Phase

HEADER = ("phase", "bits", "batch", "tokens", "layers", "seconds", "before_s", "after_s")
Identity = Sequence[tuple[str, str]]


def journal_file(table: Path) -> Path:
    """Where the timings of a table are kept until it is written."""
    return table.with_name(table.name + ".part")


class Journal:
    """An open journal.

    Args:
        path: the file.
        identity: what is measured, on what, by what.
        resume: take up the timings of an earlier run; else they are overwritten.

    Raises:
        SpecError: the earlier run measured something else, or the file is no journal.
    """

    def __init__(self, path: Path, identity: Identity, *, resume: bool) -> None:
        self._path = path
        self.timed: list[Timed] = []
        if resume and path.exists():
            self.timed = read_journal(path, identity)
        lines = [f"# {key}: {value}" for key, value in identity]
        text = "\n".join([*lines, ",".join(HEADER), ""])
        self._file = path.open("w", encoding="utf-8")
        self._file.write(text)
        self.add(self.timed)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file; what is in it stays."""
        self._file.close()

    def add(self, timed: Iterable[Timed]) -> None:
        """Write timings down at once."""
        for one in timed:
            trial = one.timing.trial
            shape = trial.shape
            cells = (
                shape.phase.value,
                trial.bits,
                shape.batch,
                shape.tokens,
                trial.layers,
                repr(one.timing.seconds),
                repr(one.before_s),
                repr(one.after_s),
            )
            self._file.write(",".join(str(cell) for cell in cells) + "\n")
        self._file.flush()

    def remove(self) -> None:
        """Delete the file: the table is written."""
        self._path.unlink(missing_ok=True)


def read_journal(path: Path, identity: Identity) -> list[Timed]:
    """Read the timings of an interrupted run; a last line cut short is left out.

    Raises:
        SpecError: see ``Journal``.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    said = [line[1:].partition(":") for line in lines if line.startswith("#")]
    found = {key.strip(): value.strip() for key, _, value in said}
    for key, value in identity:
        if found.get(key) != value:
            raise SpecError(
                f"{path}: field '{key}': found '{found.get(key)}', expected '{value}' as in this "
                "run; without --resume it starts afresh"
            )
    whole = [line for line in lines if line.endswith("\n") and not line.startswith("#")]
    rows = list(csv.reader(whole))
    if not rows or tuple(rows[0]) != HEADER:
        raise bad_field(str(path), "header", ",".join(rows[0]) if rows else "", ",".join(HEADER))
    return [_timed(path, row) for row in rows[1:]]


def _timed(path: Path, row: list[str]) -> Timed:
    try:
        phase, bits, batch, tokens, layers, seconds, before_s, after_s = row
        shape = Shape(phase=Phase(phase), batch=int(batch), tokens=int(tokens))
        trial = Trial(shape=shape, bits=int(bits), layers=int(layers))
        return Timed(
            timing=Timing(trial=trial, seconds=float(seconds)),
            before_s=float(before_s),
            after_s=float(after_s),
        )
    except ValueError:
        raise bad_field(str(path), "row", ",".join(row), ",".join(HEADER)) from None
