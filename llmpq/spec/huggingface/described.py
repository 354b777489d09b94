"""Model files: the sizes of a model whose family the table lacks, as JSON.

``llmpq-profile describe`` writes them with torch; planning reads them without.
"""

from __future__ import annotations

from pathlib import Path

from llmpq.spec.fields import SCHEMA, Fields, dump_json, from_json, read_json, to_json, write_text
from llmpq.spec.model import ModelSpec

MODEL_FILE = "model_sizes.json"
"""Name of the file inside a model directory."""


def read_model_file(path: str | Path) -> ModelSpec:
    """Read a model file.

    Raises:
        SpecError: it is missing, or a field is missing, unknown or not acceptable.
    """
    fields = Fields(read_json(path), str(path))
    fields.schema()
    return from_json(ModelSpec, fields)


def write_model_file(path: str | Path, model: ModelSpec) -> None:
    """Write a model file.

    Raises:
        SpecError: it cannot be written.
    """
    write_text(path, dump_json({"schema": SCHEMA, **to_json(model)}))
