"""Measured tables: latencies of layers and of links, written by the profiler.

A latency table is CSV with the header ``phase,bits,batch,tokens,seconds``, a link table is CSV with
``from,to,bytes,seconds``. Lines that start with ``#`` carry provenance as ``# key: value``.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from llmpq.errors import SpecError, bad_field
from llmpq.spec.fields import MAX_FILE_BYTES, read_text, write_text
from llmpq.spec.precision import BITS, Phase

MASTER_BITS = 0
"""Bits of the rows that hold the master's own work: embedding, final norm, head of 16 bits,
sampling."""
LATENCY_HEADER = ("phase", "bits", "batch", "tokens", "seconds")
COMM_HEADER = ("from", "to", "bytes", "seconds")
ENDS_KEY = "ends_s"
"""Provenance key of a link table: processor seconds of an empty message between two nodes."""
_MAX_END_S = 3600.0


def master_bits(head_bits: int) -> int:
    """Return the bits of the rows that hold the master's own work with a head of ``head_bits``.

    They are negative where the head is quantized: -8 for one of 8 bits.
    """
    return MASTER_BITS if head_bits == 16 else -head_bits


TABLE_BITS = (*BITS, *map(master_bits, BITS))
"""Bits of the rows of a latency table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySample:
    """Median seconds of ONE decoder layer.

    Attributes:
        bits: bitwidth of the layer's weights, or ``master_bits`` of the master's own work.
        batch: sequences in the micro-batch ``v``.
        tokens: prompt length ``s``, or context length ``s + t`` for decode.
    """

    phase: Phase
    bits: int
    batch: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTable:
    """Samples of one model on one device, with their provenance."""

    samples: tuple[LatencySample, ...]
    provenance: tuple[tuple[str, str], ...] = ()

    def select(self, phase: Phase, bits: int) -> tuple[LatencySample, ...]:
        """Return the samples of one phase and bitwidth."""
        return tuple(
            sample for sample in self.samples if sample.phase is phase and sample.bits == bits
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommSample:
    """Seconds to send ``size_bytes`` from one node to another."""

    source: str
    target: str
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CommTable:
    """Measured sends, with their provenance."""

    samples: tuple[CommSample, ...]
    provenance: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEnds:
    """Processor seconds of an empty message at either end of a link, without waiting."""

    send_s: float
    receive_s: float


def ends_line(between: tuple[str, str], ends: LinkEnds) -> tuple[str, str]:
    """Return the provenance line ``ends_s A B: send 0.00015 receive 0.00014``."""
    return f"{ENDS_KEY} {' '.join(between)}", f"send {ends.send_s!r} receive {ends.receive_s!r}"


def ends_of(file: str, table: CommTable, between: tuple[str, str]) -> LinkEnds | None:
    """Read the processor seconds of a message between two nodes; ``None`` without the line.

    Raises:
        SpecError: the line is malformed.
    """
    said = dict(table.provenance)
    keys = (f"{ENDS_KEY} {first} {second}" for first, second in (between, between[::-1]))
    key = next((one for one in keys if one in said), None)
    if key is None:
        return None
    try:
        send, one, receive, other = said[key].split()
        found = LinkEnds(send_s=float(one), receive_s=float(other))
    except ValueError:
        send, receive, found = "", "", LinkEnds(send_s=-1.0, receive_s=-1.0)
    is_good = all(0.0 <= value < _MAX_END_S for value in (found.send_s, found.receive_s))
    if (send, receive) != ("send", "receive") or not is_good:
        raise SpecError(
            f"{file}: provenance '{key}': found '{said[key]}', expected 'send X receive Y', both "
            f"at least 0 and below {_MAX_END_S:g} seconds"
        )
    return found


def read_latency_table(path: str | Path) -> LatencyTable:
    """Read a latency CSV; ``SpecError`` names file, line, column and value."""
    rows, provenance = read_csv(path, LATENCY_HEADER)
    samples = []
    for where, row in rows:
        phase = row["phase"]
        if phase not in tuple(Phase):
            raise bad_field(where, "phase", phase, "prefill or decode")
        bits = whole_number(where, "bits", row["bits"], minimum=min(TABLE_BITS))
        if bits not in TABLE_BITS:
            raise bad_field(
                where, "bits", bits, f"one of {BITS}, or 0, -8, -4, -3 for the master's work"
            )
        samples.append(
            LatencySample(
                phase=Phase(phase),
                bits=bits,
                batch=whole_number(where, "batch", row["batch"]),
                tokens=whole_number(where, "tokens", row["tokens"]),
                seconds=_positive(where, "seconds", row["seconds"]),
            )
        )
    return LatencyTable(samples=tuple(samples), provenance=provenance)


def write_latency_table(path: str | Path, table: LatencyTable) -> None:
    """Write a latency CSV."""
    _write_csv(path, LATENCY_HEADER, table)


def read_comm_table(path: str | Path) -> CommTable:
    """Read a link CSV."""
    rows, provenance = read_csv(path, COMM_HEADER)
    samples = tuple(
        CommSample(
            source=row["from"],
            target=row["to"],
            size_bytes=whole_number(where, "bytes", row["bytes"]),
            seconds=_positive(where, "seconds", row["seconds"]),
        )
        for where, row in rows
    )
    return CommTable(samples=samples, provenance=provenance)


def write_comm_table(path: str | Path, table: CommTable) -> None:
    """Write a link CSV."""
    _write_csv(path, COMM_HEADER, table)


def read_csv(
    path: str | Path, *headers: tuple[str, ...], max_bytes: float = MAX_FILE_BYTES
) -> tuple[list[tuple[str, dict[str, str]]], tuple[tuple[str, str], ...]]:
    """Read a CSV file with one of the given headers.

    Returns:
        The place (file and line, for messages) and the cells of every row, and the provenance of
        the lines that start with ``#``.

    Raises:
        SpecError: the file cannot be read, has another header, no rows, or a row of other length.
    """
    provenance = []
    body = []
    for number, line in enumerate(_lines(Path(path), max_bytes), start=1):
        if line.startswith("#"):
            key, _, value = line[1:].partition(":")
            provenance.append((key.strip(), value.strip()))
        elif line.strip():
            where = f"{path}: line {number}"
            body.append((where, _cells(where, line)))
    header = tuple(body[0][1]) if body else ()
    if header not in headers:
        found = ",".join(header)[:80] or "nothing"
        raise bad_field(str(path), "header", found, " or ".join(map(",".join, headers)))
    if len(body) == 1:
        raise SpecError(f"{path}: found no rows, expected at least one")
    for where, cells in body[1:]:
        if len(cells) != len(header):
            raise SpecError(f"{where}: found {len(cells)} columns, expected {len(header)}")
    rows = [(where, dict(zip(header, cells, strict=True))) for where, cells in body[1:]]
    return rows, tuple(provenance)


def _lines(path: Path, max_bytes: float) -> list[str]:
    try:
        if path.stat().st_size > max_bytes:
            raise SpecError(f"{path}: larger than {max_bytes} bytes, expected a table")
        return read_text(path).splitlines()
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error}") from None


def _cells(where: str, line: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line]))]
    except csv.Error as error:
        raise SpecError(f"{where}: not CSV: {error}") from None


def _write_csv(path: str | Path, header: Sequence[str], table: LatencyTable | CommTable) -> None:
    """Write the fields of every sample, which are in the order of the header."""
    out = io.StringIO()
    for key, value in table.provenance:
        out.write(f"# {key}: {value}\n")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(map(astuple, table.samples))
    write_text(path, out.getvalue())


def whole_number(where: str, field: str, text: str, minimum: int = 1, maximum: int = 2**62) -> int:
    """Return a cell as a whole number in ``[minimum, maximum]``."""
    try:
        value = int(text)
    except ValueError:
        raise bad_field(where, field, text, "a whole number") from None
    if not minimum <= value <= maximum:
        raise bad_field(where, field, text, f"a whole number in [{minimum}, {maximum}]")
    return value


def _positive(where: str, field: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise bad_field(where, field, text, "a number of seconds") from None
    if not math.isfinite(value) or value <= 0:
        raise bad_field(where, field, text, "a positive number of seconds")
    return value
