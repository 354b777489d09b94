"""Measured tables: latencies of layers and of links, and losses of layers at each bitwidth.

A latency table is CSV with the header ``phase,bits,batch,tokens,seconds``, a link table is CSV with
``from,to,bytes,seconds``. Lines that start with ``#`` carry provenance as ``# key: value``.

A sensitivity table is JSON. It carries two digests of its model: one of the shapes, which a
catalogue entry has too, and one of the weights, which only a model directory has. The digest of the
weights reads samples of every file: it separates a model from a fine-tuned version within
milliseconds, but does not prove that the files are intact.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from llmpq.errors import SpecError, bad_field
from llmpq.spec.fields import (
    MAX_FILE_BYTES,
    SCHEMA,
    Rule,
    digest_of,
    dump_json,
    from_json,
    read_fields,
    read_text,
    to_json,
    write_text,
)
from llmpq.spec.model import ModelSpec
from llmpq.spec.model_files.weight_headers import find_gguf, read_gguf_header
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


SHAPES_KEY = "shapes_sha256"
WEIGHTS_KEY = "weights_sha256"
NATS_KEY = "unit_nats"

_SAMPLES = 64
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityTable:
    """Quality loss of each layer at each bitwidth.

    Attributes:
        model: name of the model it was measured on.
        method: indicator that made it.
        omega: for each bitwidth, one value a layer, raw; 16 bits is 0 and not listed.
        head: for each bitwidth the LM head's value, with that of a token embedding which is the
            same matrix; ``None`` where it was not measured.
        provenance: key and value pairs.
    """

    SCHEMA: ClassVar[int] = SCHEMA

    model: str
    method: str
    omega: Annotated[
        tuple[tuple[int, Annotated[tuple[float, ...], Rule(minimum=1)]], ...],
        Rule(minimum=1, choices=("3", "4", "8")),
    ]
    head: Annotated[tuple[tuple[int, float], ...] | None, Rule(choices=("3", "4", "8"))] = None
    provenance: Annotated[tuple[tuple[str, Any], ...], Rule(optional=True)] = ()

    def __post_init__(self) -> None:
        if len({len(values) for _, values in self.omega}) > 1:
            raise SpecError(
                f"sensitivity table of {self.model}: field 'omega': found arrays of different "
                "lengths, expected one value for each layer"
            )

    @property
    def num_layers(self) -> int:
        """Layers the table covers."""
        return len(self.omega[0][1])

    def normalised(self, bits: Sequence[int]) -> tuple[tuple[float, ...], ...]:
        """Return ``[L, B]`` values for ``bits``, scaled so that "every layer at 4 bits" is 1.

        Raises:
            SpecError: a bitwidth below 16 is not in the table, or the 4-bit column sums to zero.
        """
        columns, scale = dict(self.omega), self._unit()
        rows = []
        for layer in range(self.num_layers):
            row = []
            for width in bits:
                if width != 16 and width not in columns:
                    raise SpecError(
                        f"sensitivity table of {self.model}: no column for {width} bits, "
                        f"expected one of {sorted(columns)}"
                    )
                row.append(0.0 if width == 16 else columns[width][layer] / scale)
            rows.append(tuple(row))
        return tuple(rows)

    def normalised_head(self, bits: int) -> float:
        """Return the head's value at ``bits`` in the unit of ``normalised``.

        Raises:
            SpecError: the bitwidth is not in the table, or the 4-bit column sums to zero.
        """
        if bits == 16:
            return 0.0
        known = dict(self.head or ())
        if bits not in known:
            raise SpecError(
                f"sensitivity table of {self.model}: field 'head': no value for {bits} bits, "
                f"expected one of {sorted(known)}"
            )
        return known[bits] / self._unit()

    @property
    def unit_nats(self) -> float | None:
        """KL divergence of a token, in nats, that a normalised loss of 1 stands for.

        ``None`` where the table does not state it.

        Raises:
            SpecError: it states something else than a number.
        """
        stated = dict(self.provenance).get(NATS_KEY)
        try:
            found = None if stated is None else float(stated)
        except (TypeError, ValueError):
            found = math.nan
        if found is not None and not 0 < found < math.inf:
            where = f"sensitivity table of {self.model}"
            raise bad_field(where, f"provenance.{NATS_KEY}", stated, "a positive number of nats")
        return found

    def _unit(self) -> float:
        """Return the sum of the 4-bit column."""
        unit = sum(dict(self.omega).get(4, ()))
        if unit <= 0:
            raise SpecError(
                f"sensitivity table of {self.model}: found a 4-bit column that sums to {unit}, "
                "expected a positive sum (it is the unit of quality)"
            )
        return unit


def read_sensitivity(path: str | Path) -> SensitivityTable:
    """Read a sensitivity JSON file."""
    table = from_json(SensitivityTable, read_fields(path, "sensitivity"))
    return replace(table, provenance=tuple((key, str(value)) for key, value in table.provenance))


def write_sensitivity(path: str | Path, table: SensitivityTable) -> None:
    """Write a sensitivity JSON file."""
    write_text(path, dump_json(to_json(table)))


def shapes_digest(model: ModelSpec) -> str:
    """Digest of the operators and heads of all layers, without the model's name."""
    kinds = [asdict(kind) for kind in model.layer_types]
    return digest_of({"kinds": kinds, "layers": list(model.layer_kinds)})


def weights_digest(model_dir: str | Path) -> str:
    """Digest of a model's safetensors or GGUF files: names, sizes, and evenly spread samples.

    Raises:
        SpecError: there is no such file, or one cannot be read.
    """
    state = hashlib.sha256()
    gguf = find_gguf(model_dir)
    files = sorted(Path(model_dir).glob("*.safetensors"))
    if gguf is not None:
        files = list(read_gguf_header(gguf).files)
    if not files:
        raise SpecError(f"{model_dir}: found no safetensors files, expected the weights")
    try:
        for file in files:
            _add_file(state, file)
    except OSError as error:
        raise SpecError(f"{model_dir}: the weights cannot be read: {error}") from None
    return state.hexdigest()


def check_measured_on(
    table: SensitivityTable, model: ModelSpec, model_dir: str | Path | None, where: str
) -> None:
    """Check that a table was measured on a model; ``where`` is its file, for messages.

    A table without digests, such as one written by hand, is checked for its number of layers only,
    and a model without a directory for its shapes.

    Raises:
        SpecError: another number of layers, other shapes, or other weights.
    """
    known = dict(table.provenance)
    advice = "measure this model with llmpq-indicator"
    if table.num_layers != model.num_layers:
        raise SpecError(
            f"{where}: field 'omega': found {table.num_layers} layers of {table.model}, expected "
            f"the {model.num_layers} layers of {model.name}; {advice}"
        )
    if known.get(SHAPES_KEY, shapes_digest(model)) != shapes_digest(model):
        raise SpecError(
            f"{where}: field 'provenance.{SHAPES_KEY}': found a table of {table.model}, whose "
            f"layers have other shapes than those of {model.name}; {advice}"
        )
    if model_dir is None or WEIGHTS_KEY not in known:
        return
    found = weights_digest(model_dir)
    if known[WEIGHTS_KEY] != found:
        raise SpecError(
            f"{where}: field 'provenance.{WEIGHTS_KEY}': found {known[WEIGHTS_KEY][:12]}, weights "
            f"of {table.model}, expected {found[:12]}, those in {model_dir}; {advice}"
        )


def _add_file(state: hashlib._Hash, file: Path) -> None:
    size = file.stat().st_size
    state.update(f"\0{file.name}\0{size}\0".encode())
    step = max(1, (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
    with file.open("rb") as stream:
        for offset in range(0, max(1, size - _SAMPLE_BYTES + 1), step):
            stream.seek(offset)
            state.update(stream.read(_SAMPLE_BYTES))
