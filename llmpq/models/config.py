"""Read and check configurations, without running code of the model directory.

The attention window and the KV shape of a layer follow from the configuration.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from llmpq.errors import SpecError, bad_field
from llmpq.logging import get_logger
from llmpq.models.adapter import Skeleton
from llmpq.models.attention import KVShape
from llmpq.spec.facts.model_fields import CONFIG_FILE, model_fields
from llmpq.spec.families import family_of
from llmpq.spec.huggingface.language import language_fields

_logger = get_logger(__name__)

MAX_LAYERS = 10_000


def load_config(model_dir: Path | str) -> PreTrainedConfig:
    """Read ``config.json`` of ``model_dir`` and choose the attention function.

    Only configuration classes of transformers are used: ``auto_map`` is ignored.

    Raises:
        SpecError: the file is missing or not JSON, ``model_type`` is unknown, transformers rejects
            a field, or the model is not a plain decoder.
    """
    return load_skeleton(model_dir)[0]


def load_skeleton(model_dir: Path | str) -> tuple[PreTrainedConfig, Skeleton]:
    """Return the configuration of :func:`load_config` and the skeleton of its model."""
    return prepare_config(read_config(model_fields(model_dir), str(Path(model_dir) / CONFIG_FILE)))


def read_config(fields: Mapping[str, Any], path: str) -> PreTrainedConfig:
    """Read the fields of a ``config.json`` with the classes of transformers.

    Of a multimodal model, the configuration is that of its language model.

    Args:
        fields: from ``model_fields``.
        path: of the file, for messages.

    Raises:
        SpecError: ``model_type`` is unknown, or transformers rejects a field.
    """
    language = dict(language_fields(fields))
    model_type = language.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise bad_field(path, "model_type", model_type, "a family that transformers knows")
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(language)
    except Exception as error:  # transformers validates with many exception types
        raise SpecError(f"{path}: transformers rejects this configuration: {error}") from error
    return config


def prepare_config(config: PreTrainedConfig) -> tuple[PreTrainedConfig, Skeleton]:
    """Return a copy with the functions that transformers chooses, and the model's skeleton.

    Raises:
        SpecError: the model is not a plain decoder.
    """
    prepared = copy.deepcopy(config)
    _check_layers(prepared)
    family = family_of(prepared.model_type)
    if family.unsupported is not None:
        raise SpecError(f"model family {family.name}: not supported: {family.unsupported}")
    if not family.is_tested:
        _logger.warning("family %s was not tested against transformers", family.name)
    skeleton = Skeleton.of(prepared)
    chosen = skeleton.model.config
    prepared._attn_implementation = chosen._attn_implementation
    if hasattr(chosen, "_experts_implementation"):
        prepared._experts_implementation = chosen._experts_implementation
    return prepared, skeleton


def _check_layers(config: PreTrainedConfig) -> None:
    count = getattr(config, "num_hidden_layers", None)
    if type(count) is not int or not 1 <= count <= MAX_LAYERS:
        raise bad_field("config.json", "num_hidden_layers", count, f"1 to {MAX_LAYERS}")
    kinds = getattr(config, "layer_types", None)
    if kinds and len(kinds) != count:
        raise bad_field("config.json", "layer_types", kinds, f"one of each of {count} layers")
    if getattr(config, "alibi", False):
        raise bad_field("config.json", "alibi", config.alibi, "rotary positions")
    _check_hand_over(config)
    for index in range(count):
        layer_window(config, index)
        layer_chunk(config, index)


def _check_hand_over(config: PreTrainedConfig) -> None:
    """Raise an error if layers need more than hidden states, in a way that is not known here."""
    needs = {
        "num_kv_shared_layers": "layers read keys and values of earlier layers",
        "hidden_size_per_layer_input": "every layer has embeddings of its own",
        "altup_num_inputs": "a token has several hidden states",
    }
    for field, reason in needs.items():
        value = getattr(config, field, None)
        if value and not family_of(config.model_type).sends_more:
            raise SpecError(
                f"model family {config.model_type}: field '{field}' = {value}: {reason}, which "
                "stages send on for Gemma 3n and Gemma 4 only; such a model is planned, not run"
            )
    kv_sources(config)


def kv_sources(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """Return for every layer the earlier layer whose keys and values it reads.

    The last ``num_kv_shared_layers`` layers read those of the last layer of their kind before them
    (Gemma 3n, Gemma 4); other layers read their own: ``None``.

    Raises:
        SpecError: there is no such layer before them.
    """
    count: int = config.num_hidden_layers
    shared: int = getattr(config, "num_kv_shared_layers", None) or 0
    if not shared:
        return (None,) * count
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ()
    first = count - shared
    last_of_kind = {kind: index for index, kind in enumerate(kinds[: max(0, first)])}
    if any(kind not in last_of_kind for kind in kinds) or len(kinds) != count:
        raise bad_field(
            "config.json", "num_kv_shared_layers", shared, "layers of every kind before them"
        )
    return tuple(None if index < first else last_of_kind[kind] for index, kind in enumerate(kinds))


def layer_window(config: PreTrainedConfig, index: int) -> int | None:
    """Return the attention window of layer ``index`` in tokens; ``None`` for none.

    Raises:
        SpecError: the attention type of the layer is neither full, sliding nor chunked.
    """
    window: int | None = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if not layer_types:
        return window
    kind = layer_types[index]
    if kind == "sliding_attention":
        return window
    if kind in ("full_attention", "chunked_attention"):
        return None
    raise SpecError(
        f"model family {config.model_type}: layer {index} is '{kind}', expected full_attention, "
        "sliding_attention or chunked_attention; layers with a recurrent state or another pattern "
        "are planned, not run"
    )


def layer_chunk(config: PreTrainedConfig, index: int) -> int | None:
    """Return the size of the chunks that attend to themselves in layer ``index`` (Llama 4).

    Returns:
        ``None`` for a layer without chunks.

    Raises:
        SpecError: the layer has chunks and the configuration has no size of them.
    """
    layer_types = getattr(config, "layer_types", None)
    if not layer_types or layer_types[index] != "chunked_attention":
        return None
    chunk: int | None = getattr(config, "attention_chunk_size", None)
    if chunk is None:
        raise bad_field("config.json", "attention_chunk_size", chunk, "tokens of a chunk")
    return chunk


def has_latent_attention(config: PreTrainedConfig) -> bool:
    """Return whether a token leaves a latent vector in the cache (DeepSeek-V2, Sec. 2.1)."""
    return getattr(config, "kv_lora_rank", None) is not None


def kv_shapes(config: PreTrainedConfig, first_layer: int, end_layer: int) -> tuple[KVShape, ...]:
    """Return the KV shapes of layers ``[first_layer, end_layer)``.

    Of several layers that read keys and values of one layer, only the first keeps a copy, and none
    if that layer is among them: the others have no heads.
    """
    sources, kept, found = kv_sources(config), set(range(first_layer, end_layer)), []
    for index in range(first_layer, end_layer):
        source = sources[index]
        shape = layer_kv_shape(config, index if source is None else source)
        is_read_elsewhere = source is not None and source in kept
        found.append(replace(shape, heads=0) if is_read_elsewhere else shape)
        if source is not None:
            kept.add(source)
    return tuple(found)


def layer_kv_shape(config: PreTrainedConfig, index: int) -> KVShape:
    """Return the shape of the keys and values that a layer makes."""
    layers: Sequence[PreTrainedConfig] | None = getattr(config, "per_layer_config", None)
    shape = _kv_shape(config if layers is None else layers[index])  # layers of Gemma 4 differ
    return replace(shape, window=layer_window(config, index), chunk=layer_chunk(config, index))


def largest_window(config: PreTrainedConfig) -> int | None:
    """Return the largest window, or chunk that attends to itself, of all layers."""
    count = config.num_hidden_layers
    windows = [layer_kv_shape(config, index).kept_tokens or 0 for index in range(count)]
    return max(windows) or None


def _kv_shape(config: PreTrainedConfig) -> KVShape:
    if has_latent_attention(config):
        return KVShape(heads=1, head_dim=config.kv_lora_rank, value_dim=config.qk_rope_head_dim)
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return KVShape(heads=_kv_heads(config), head_dim=head_dim)


def _kv_heads(config: PreTrainedConfig) -> int:
    is_shared: bool | None = getattr(config, "multi_query", None)
    if is_shared is not None and not getattr(config, "new_decoder_architecture", False):
        return 1 if is_shared else int(config.num_attention_heads)
    named = (getattr(config, name, None) for name in ("num_key_value_heads", "num_kv_heads"))
    return next((heads for heads in named if heads), int(config.num_attention_heads))
