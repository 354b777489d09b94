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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmpq.errors import SpecError
from llmpq.spec.fields import SCHEMA, Fields, digest_of, dump_json, read_json, write_text
from llmpq.spec.model import ModelSpec
from llmpq.spec.precision import BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityTable:
    """How much each layer loses at each bitwidth.

    Attributes:
        model: name of the model it was measured on.
        method: indicator that made it.
        omega: for each bitwidth, one value a layer, raw; 16 bits is 0 and not listed.
        provenance: key and value pairs.
    """

    model: str
    method: str
    omega: tuple[tuple[int, tuple[float, ...]], ...]
    provenance: tuple[tuple[str, str], ...] = ()

    @property
    def num_layers(self) -> int:
        """Layers the table covers."""
        return len(self.omega[0][1])

    def normalised(self, bits: Sequence[int]) -> tuple[tuple[float, ...], ...]:
        """Return ``[L, B]`` values for ``bits``, scaled so that "every layer at 4 bits" is 1.

        Raises:
            SpecError: a bitwidth below 16 is not in the table, or the 4-bit column sums to zero.
        """
        columns = dict(self.omega)
        scale = sum(columns.get(4, ()))
        if scale <= 0:
            raise SpecError(
                f"sensitivity table of {self.model}: found a 4-bit column that sums to {scale}, "
                "expected a positive sum (it is the unit of quality)"
            )
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


def read_sensitivity(path: str | Path) -> SensitivityTable:
    """Read a sensitivity JSON file."""
    fields = Fields(read_json(path), str(path))
    fields.schema()
    model, method = fields.text("model"), fields.text("method")
    columns = fields.take("omega")
    if not isinstance(columns, dict) or not columns:
        raise fields.error("omega", columns, "an object of one array per bitwidth")
    omega = tuple((_width(fields, key), _column(fields, key, columns[key])) for key in columns)
    if len({len(values) for _, values in omega}) != 1:
        raise fields.error("omega", "arrays of unlike length", "one value a layer in each")
    provenance = fields.take("provenance") if fields.has("provenance") else {}
    if not isinstance(provenance, dict):
        raise fields.error("provenance", provenance, "an object")
    fields.done()
    return SensitivityTable(
        model=model,
        method=method,
        omega=omega,
        provenance=tuple((str(key), str(value)) for key, value in provenance.items()),
    )


def write_sensitivity(path: str | Path, table: SensitivityTable) -> None:
    """Write a sensitivity JSON file."""
    value: dict[str, Any] = {
        "schema": SCHEMA,
        "model": table.model,
        "method": table.method,
        "omega": {str(bits): list(values) for bits, values in table.omega},
        "provenance": dict(table.provenance),
    }
    write_text(path, dump_json(value))


def _width(fields: Fields, key: str) -> int:
    if key not in {str(bits) for bits in BITS if bits != 16}:
        raise fields.error(f"omega.{key}", key, "3, 4 or 8")
    return int(key)


def _column(fields: Fields, key: str, values: object) -> tuple[float, ...]:
    good = isinstance(values, list) and all(
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value >= 0
        for value in values
    )
    if not good or not values:
        raise fields.error(f"omega.{key}", values, "an array of finite values, none negative")
    return tuple(float(value) for value in values)  # type: ignore[attr-defined]


SHAPES_KEY = "shapes_sha256"
WEIGHTS_KEY = "weights_sha256"

_SAMPLES = 64
_SAMPLE_BYTES = 4096


def shapes_digest(model: ModelSpec) -> str:
    """Digest of every layer's operators and heads, in order; blind to the model's name."""
    kinds = [asdict(kind) for kind in model.layer_types]
    return digest_of({"kinds": kinds, "layers": list(model.layer_kinds)})


def weights_digest(model_dir: str | Path) -> str:
    """Digest of the safetensors files of a directory: names, sizes, and evenly spread samples.

    Raises:
        SpecError: there is no such file, or one cannot be read.
    """
    state = hashlib.sha256()
    files = sorted(Path(model_dir).glob("*.safetensors"))
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
    """Refuse a table that was measured on another model.

    A table without digests, such as one written by hand, is held against the number of layers
    alone.

    Args:
        table: the table.
        model: what is planned.
        model_dir: its weights, ``None`` for a catalogue entry: then only shapes are compared.
        where: the table's file, for messages.

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
