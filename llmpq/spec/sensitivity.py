"""Sensitivity tables: the loss of each layer at each bitwidth, and the model it was measured on.

A table carries two digests of its model: one of the shapes, which a catalogue entry has too, and
one of the weights, which only a model directory has. The digest of the weights reads samples of
every file: it separates a model from a fine-tuned version within milliseconds, but does not prove
that the files are intact.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from llmpq.errors import SpecError, bad_field
from llmpq.spec.codec import Rule, from_json, to_json
from llmpq.spec.fields import SCHEMA, digest_of, dump_json, read_fields, write_text
from llmpq.spec.gguf.header import find_gguf, read_header
from llmpq.spec.model import ModelSpec

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
        files = list(read_header(gguf).files)
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
