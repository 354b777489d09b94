"""Measured tables: latencies of layers and of links, written by the profiler.

A latency table is CSV with the header ``phase,bits,batch,tokens,seconds``, a link table is CSV with
``from,to,bytes,seconds``. Lines that start with ``#`` carry provenance as ``# key: value``.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmpq.errors import SpecError, bad_field
from llmpq.spec.fields import MAX_FILE_BYTES, write_text
from llmpq.spec.precision import BITS, Phase

LATENCY_HEADER = ("phase", "bits", "batch", "tokens", "seconds")
COMM_HEADER = ("from", "to", "bytes", "seconds")
ENDS_KEY = "ends_s"
"""Provenance line of a link table, with two nodes: what an empty message takes of either end."""
_MAX_END_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySample:
    """Seconds of ONE decoder layer.

    Attributes:
        phase: prefill or decode, or ``master`` work of that phase when ``bits`` is 0.
        bits: bitwidth of the layer's weights; 0 marks the master's own work (embedding, head).
        batch: sequences in the micro-batch ``v``.
        tokens: prompt length ``s``, or context length ``s + t`` for decode.
        seconds: median time.
    """

    phase: Phase
    bits: int
    batch: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTable:
    """Samples of one model on one device, with where they come from."""

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
    """Measured sends, with where they come from."""

    samples: tuple[CommSample, ...]
    provenance: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEnds:
    """Seconds that an empty message takes of a processor, where nobody has to wait for it.

    Attributes:
        send_s: to hand it over.
        receive_s: to take it in when it is there already.
    """

    send_s: float
    receive_s: float


def ends_line(between: tuple[str, str], ends: LinkEnds) -> tuple[str, str]:
    """Return the provenance line ``ends_s A B: send 0.00015 receive 0.00014``."""
    return f"{ENDS_KEY} {' '.join(between)}", f"send {ends.send_s!r} receive {ends.receive_s!r}"


def ends_of(file: str, table: CommTable, between: tuple[str, str]) -> LinkEnds | None:
    """Read what a message between two nodes takes of its ends; ``None`` without the line.

    Raises:
        SpecError: the line says something else.
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
    rows, provenance = _read_csv(path, LATENCY_HEADER)
    samples = []
    for line, row in rows:
        where = f"{path}: line {line}"
        phase = row["phase"]
        if phase not in tuple(Phase):
            raise bad_field(where, "phase", phase, "prefill or decode")
        bits = _whole(where, "bits", row["bits"], minimum=0)
        if bits not in (*BITS, 0):
            raise bad_field(where, "bits", bits, f"one of {BITS}, or 0 for the master's work")
        samples.append(
            LatencySample(
                phase=Phase(phase),
                bits=bits,
                batch=_whole(where, "batch", row["batch"]),
                tokens=_whole(where, "tokens", row["tokens"]),
                seconds=_positive(where, "seconds", row["seconds"]),
            )
        )
    if not samples:
        raise SpecError(f"{path}: found no samples, expected at least one row")
    return LatencyTable(samples=tuple(samples), provenance=provenance)


def write_latency_table(path: str | Path, table: LatencyTable) -> None:
    """Write a latency CSV."""
    rows = [
        (sample.phase.value, sample.bits, sample.batch, sample.tokens, repr(sample.seconds))
        for sample in table.samples
    ]
    write_text(path, _csv_text(LATENCY_HEADER, rows, table.provenance))


def read_comm_table(path: str | Path) -> CommTable:
    """Read a link CSV."""
    rows, provenance = _read_csv(path, COMM_HEADER)
    samples = tuple(
        CommSample(
            source=row["from"],
            target=row["to"],
            size_bytes=_whole(f"{path}: line {line}", "bytes", row["bytes"]),
            seconds=_positive(f"{path}: line {line}", "seconds", row["seconds"]),
        )
        for line, row in rows
    )
    if not samples:
        raise SpecError(f"{path}: found no samples, expected at least one row")
    return CommTable(samples=samples, provenance=provenance)


def write_comm_table(path: str | Path, table: CommTable) -> None:
    """Write a link CSV."""
    rows = [
        (sample.source, sample.target, sample.size_bytes, repr(sample.seconds))
        for sample in table.samples
    ]
    write_text(path, _csv_text(COMM_HEADER, rows, table.provenance))


def _read_csv(
    path: str | Path, header: tuple[str, ...]
) -> tuple[list[tuple[int, dict[str, str]]], tuple[tuple[str, str], ...]]:
    path = Path(path)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SpecError(f"{path}: larger than {MAX_FILE_BYTES} bytes, expected a table")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read: {error}") from None
    provenance = []
    body = []
    for number, line in enumerate(lines, start=1):
        if line.startswith("#"):
            key, _, value = line[1:].partition(":")
            provenance.append((key.strip(), value.strip()))
        elif line.strip():
            body.append((number, next(csv.reader([line]))))
    if not body or tuple(body[0][1]) != header:
        found = ",".join(body[0][1]) if body else "nothing"
        raise bad_field(str(path), "header", found, ",".join(header))
    rows = []
    for number, cells in body[1:]:
        if len(cells) != len(header):
            raise SpecError(f"{path}: line {number}: {len(cells)} cells, expected {len(header)}")
        rows.append((number, dict(zip(header, cells, strict=True))))
    return rows, tuple(provenance)


def _csv_text(
    header: Sequence[str], rows: Sequence[Sequence[object]], provenance: Sequence[tuple[str, str]]
) -> str:
    out = io.StringIO()
    for key, value in provenance:
        out.write(f"# {key}: {value}\n")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return out.getvalue()


def _whole(where: str, field: str, text: str, minimum: int = 1) -> int:
    try:
        value = int(text)
    except ValueError:
        raise bad_field(where, field, text, "a whole number") from None
    if value < minimum:
        raise bad_field(where, field, text, f"a whole number of at least {minimum}")
    return value


def _positive(where: str, field: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise bad_field(where, field, text, "a number of seconds") from None
    if not math.isfinite(value) or value <= 0:
        raise bad_field(where, field, text, "a positive number of seconds")
    return value
