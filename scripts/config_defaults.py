#!/usr/bin/env python3
"""Write the defaults of transformers' configuration classes for the families that can be planned.

    scripts/config_defaults.py

To be run after a family is added. A ``config.json`` may leave out a field; the planner, which has
no transformers, then reads the default from ``llmpq/data/config_defaults.json``. Sizes that define
a model are apart: only the text part of a multimodal model may leave them out.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

from llmpq.spec.huggingface.config import DEFAULTS_FILE
from llmpq.spec.huggingface.families import model_types

PATH = Path(__file__).resolve().parent.parent / "llmpq" / "data" / DEFAULTS_FILE
SIZES = frozenset(
    {
        *("hidden_size", "n_embed", "n_embd", "d_model", "vocab_size"),
        *("num_hidden_layers", "n_layer", "n_layers", "num_attention_heads", "n_head", "n_heads"),
        "intermediate_size",
    }
)
REQUIRED = SIZES | {"dtype", "torch_dtype", "layer_types"}
IRRELEVANT = ("dropout", "token_id", "_pdrop", "aux_loss", "eps", "initializer", "mtp")


def defaults_of(model_type: str) -> dict[str, Any]:
    """Return the default of every field that may determine a size."""
    fields = {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
    base = {field.name for field in dataclasses.fields(PreTrainedConfig)} - {"tie_word_embeddings"}
    return {
        name: value
        for name, value in sorted(fields.items())
        if type(value) in (int, bool)
        and name not in REQUIRED | base
        and not any(part in name for part in IRRELEVANT)
    }


def sizes_of(model_type: str) -> dict[str, Any]:
    """Return the default of every size that defines a model."""
    fields = {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
    return {name: fields[name] for name in sorted(SIZES & fields.keys())}


def main() -> int:
    """Write the file."""
    known = [name for name in model_types() if name in CONFIG_MAPPING]
    content = {
        "schema": 1,
        "transformers": transformers.__version__,
        "families": {name: defaults_of(name) for name in known},
        "sizes": {name: sizes_of(name) for name in known},
    }
    PATH.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
