"""Identity: whether a table was measured on the model that is now planned.

Two digests: of the shapes, which a catalogue entry has too, and of the weights, which only a
directory has. The digest of weights reads samples of every file, not all of it: it tells a model
from its fine-tuned sister within milliseconds, and refuses to prove that files are intact.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path

from llmpq.errors import SpecError
from llmpq.spec.fields import digest_of
from llmpq.spec.model import ModelSpec
from llmpq.spec.tables import SensitivityTable

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
