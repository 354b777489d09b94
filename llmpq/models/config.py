"""Configurations: read without running a model directory's code, and checked for what can be run.

What a layer attends to (its window) and what it leaves in the cache (its KV shape) follow from the
configuration alone, and are answered here.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

from transformers import CONFIG_MAPPING, PreTrainedConfig

from llmpq.errors import SpecError, bad_field
from llmpq.logging import get_logger
from llmpq.models.adapter import Skeleton
from llmpq.models.attention import KVShape
from llmpq.models.families import CHECKED, REFUSED

_logger = get_logger(__name__)

MAX_CONFIG_BYTES = 16 * 1024 * 1024
MAX_LAYERS = 10_000


def load_config(model_dir: Path | str) -> PreTrainedConfig:
    """Read ``config.json`` of ``model_dir`` into transformers' own class, attention chosen.

    Only classes that transformers itself ships are used: ``auto_map`` is ignored.

    Raises:
        SpecError: no such file, not JSON, an unknown ``model_type``, a field that transformers
            rejects, or a model that is not a plain decoder.
    """
    return load_skeleton(model_dir)[0]


def load_skeleton(model_dir: Path | str) -> tuple[PreTrainedConfig, Skeleton]:
    """Return :func:`load_config`'s configuration and the map of its model, made on the way."""
    path = Path(model_dir) / "config.json"
    fields = _read_json_object(path)
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise bad_field(str(path), "model_type", model_type, "a family that transformers knows")
    try:
        config = CONFIG_MAPPING[model_type].from_dict(fields)
    except Exception as error:  # transformers validates with many exception types
        raise SpecError(f"{path}: transformers rejects this configuration: {error}") from error
    return _prepared(config)


def _read_json_object(path: Path) -> dict[str, object]:
    if not path.is_file():
        raise SpecError(f"{path}: found no such file, expected a model directory's config.json")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise SpecError(f"{path}: larger than {MAX_CONFIG_BYTES} bytes, expected a configuration")
    try:
        fields = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise SpecError(f"{path}: found a JSON {type(fields).__name__}, expected an object")
    return fields


def prepare_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Copy ``config`` with the attention and expert functions that transformers would choose.

    Raises:
        SpecError: the model is not a decoder this package can cut into stages.
    """
    return _prepared(config)[0]


def _prepared(config: PreTrainedConfig) -> tuple[PreTrainedConfig, Skeleton]:
    prepared = copy.deepcopy(config)
    _check_layers(prepared)
    model_type = prepared.model_type
    if model_type in REFUSED:
        raise SpecError(f"model family {model_type}: not supported: {REFUSED[model_type]}")
    if model_type not in CHECKED:
        _logger.warning("family %s was never checked against transformers", model_type)
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
    if getattr(config, "kv_lora_rank", None):
        raise bad_field("config.json", "kv_lora_rank", config.kv_lora_rank, "no latent attention")
    for index in range(count):
        layer_window(config, index)


def layer_window(config: PreTrainedConfig, index: int) -> int | None:
    """Tokens that layer ``index`` looks back on, itself included; ``None`` for all.

    Raises:
        SpecError: the layer's kind of attention is not full or sliding.
    """
    window: int | None = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if not layer_types:
        return window
    kind = layer_types[index]
    if kind == "sliding_attention":
        return window
    if kind == "full_attention":
        return None
    raise SpecError(
        f"model family {config.model_type}: layer {index} is '{kind}', "
        "expected full_attention or sliding_attention"
    )


def kv_shapes(config: PreTrainedConfig, first_layer: int, end_layer: int) -> tuple[KVShape, ...]:
    """Keys and values of layers ``[first_layer, end_layer)``."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return (KVShape(heads=heads, head_dim=head_dim),) * (end_layer - first_layer)
