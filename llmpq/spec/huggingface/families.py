"""Model families: a ``ModelSpec`` from any supported ``config.json``, without torch.

Operators have their module path inside transformers' decoder layer as name. Sizes that define the
model must be in the file, but for the text part of a multimodal model, which published files leave
to transformers' class. Fields that older files leave out (key-value heads, head size, biases, ties,
windows) have the defaults of transformers, which differ by family. Models that are not
decoder-only or of an unknown family are errors that name file and field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmpq.spec.families import Family, family_of, known_families
from llmpq.spec.huggingface.config import HIDDEN, Config, class_sizes, family_defaults
from llmpq.spec.huggingface.described import MODEL_FILE, read_model_file
from llmpq.spec.huggingface.quantization import stored_head, stored_precisions
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model import LayerSpec, ModelSpec
from llmpq.spec.model_files.config import (
    CONFIG_FILE,
    absolute_model_path,
    language_fields,
    model_fields,
)


def load_model_dir(path: str | Path) -> ModelSpec:
    """Read ``config.json`` of a model directory; the model is named after the directory.

    A directory of an unknown family may have a model file instead (``llmpq-profile describe``).

    Raises:
        SpecError: as ``model_fields``, ``model_from_config``, ``stored_precisions`` and
            ``stored_head``.
    """
    folder = Path(path)
    file = folder / CONFIG_FILE
    config, name = model_fields(folder), absolute_model_path(folder).name
    described = folder / MODEL_FILE
    family = _family(language_fields(config))
    if (family is None or family.sizes is None) and described.is_file():
        model = replace(read_model_file(described), name=name)
    else:
        model = model_from_config(config, name, str(file))
    return replace(
        model,
        stored=stored_precisions(folder, model.num_layers),
        stored_head=stored_head(folder),
    )


def model_types() -> tuple[str, ...]:
    """Return the ``model_type`` of every family that can be planned, sorted."""
    return tuple(sorted(family.name for family in known_families() if family.sizes is not None))


def model_from_config(config: Mapping[str, Any], name: str, where: str) -> ModelSpec:
    """Read the object of a ``config.json``; ``where`` is the file, for messages.

    Raises:
        SpecError: not a decoder-only model of a known family, or a field is missing or invalid.
    """
    fields = Config(config, where)
    is_part = isinstance(config.get("text_config"), Mapping)
    config = language_fields(config)
    family = _family(config)
    if config.get("is_encoder_decoder"):
        raise fields.error("is_encoder_decoder", True, "a decoder-only model")
    if family is None or family.sizes is None:
        raise fields.error(
            "model_type",
            config.get("model_type"),
            f"one of {', '.join(model_types())}, or a description by 'llmpq-profile describe'",
        )
    defaults = family_defaults()[family.name]
    if is_part:
        defaults = {**defaults, **class_sizes()[family.name]}
    return _read(family.sizes, Config(config, where, defaults=defaults), family.name, name)


def _family(fields: Mapping[str, Any]) -> Family | None:
    model_type = fields.get("model_type")
    return family_of(model_type) if isinstance(model_type, str) else None


def _read(sizes: Sizes, fields: Config, family: str, name: str) -> ModelSpec:
    layers = _layers(sizes, fields)
    kinds = tuple(dict.fromkeys(layers))
    return ModelSpec(
        name=name,
        family=family,
        hidden_size=fields.size(*HIDDEN),
        vocab_size=fields.size("vocab_size"),
        head_in_features=sizes.width(fields),
        max_positions=sizes.max_positions(fields),
        layer_types=kinds,
        layer_kinds=tuple(kinds.index(layer) for layer in layers),
        embedding_parameters=sizes.embedding_parameters(fields),
        final_parameters=sizes.final_parameters(fields),
        head_parameters=sizes.head_parameters(fields),
        dtype=fields.dtype(),
        sent_features=sizes.sent_features(fields),
    )


def _layers(sizes: Sizes, fields: Config) -> list[LayerSpec]:
    norms = sizes.layer_norm_parameters(fields)
    windows = [None] * fields.layers() if sizes.windows is None else sizes.windows(fields)
    parts = sizes.attention(fields), sizes.feed_forward(fields), windows
    return [
        LayerSpec(
            linears=attention.linears + feed_forward.linears,
            norm_parameters=norms + attention.others + feed_forward.others,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            sliding_window=window,
            value_dim=attention.value_dim,
            state_values=attention.state_values,
            kv_source=attention.kv_source,
        )
        for attention, feed_forward, window in zip(*parts, strict=True)
    ]
