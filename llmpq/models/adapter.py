"""The default behaviour: how a decoder-only model of transformers comes apart into layers.

A one-layer copy of the model on the meta device (milliseconds, no memory) tells what its classes
are and where they sit; nothing is imported from a model directory, and no weight is made here.
Encoder-decoder models, hybrids without attention and models with parts that have no place in a
pipeline of equal layers are refused by name rather than run wrongly.
"""

from __future__ import annotations

import copy
import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from llmpq.errors import SpecError, bad_field
from llmpq.logging import get_logger
from llmpq.models.attention import KVShape
from llmpq.models.families import CHECKED, REFUSED, Family, family_of

_logger = get_logger(__name__)

MAX_CONFIG_BYTES = 16 * 1024 * 1024
MAX_LAYERS = 10_000
# Configuration fields that scale embeddings or logits in some family.
SCALES = (
    "embedding_multiplier",
    "lm_head_multiplier",
    "logit_scale",
    "logits_scaling",
    "scale_emb",
)


def load_config(model_dir: Path | str) -> PreTrainedConfig:
    """Read ``config.json`` of ``model_dir`` into transformers' own class, attention chosen.

    Only classes that transformers itself ships are used: ``auto_map`` is ignored.

    Raises:
        SpecError: no such file, not JSON, an unknown ``model_type``, a field that transformers
            refuses, or a model that is not a plain decoder.
    """
    path = Path(model_dir) / "config.json"
    fields = _read_json_object(path)
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise bad_field(str(path), "model_type", model_type, "a family that transformers knows")
    try:
        config = CONFIG_MAPPING[model_type].from_dict(fields)
    except Exception as error:  # transformers validates with many exception types
        raise SpecError(f"{path}: transformers refuses this configuration: {error}") from error
    return prepare_config(config)


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
    prepared = copy.deepcopy(config)
    _check_layers(prepared)
    model_type = prepared.model_type
    if model_type in REFUSED:
        raise SpecError(f"model family {model_type}: not supported: {REFUSED[model_type]}")
    if model_type not in CHECKED:
        _logger.warning("family %s was never checked against transformers", model_type)
    chosen = Skeleton.of(prepared).model.config
    prepared._attn_implementation = chosen._attn_implementation
    if hasattr(chosen, "_experts_implementation"):
        prepared._experts_implementation = chosen._experts_implementation
    return prepared


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Skeleton:
    """A model without weights and with one layer: the map of its parts.

    Attributes:
        model: the whole model on the meta device.
        decoder: its submodule that owns the layers.
        decoder_path: where that submodule is, such as ``model.decoder``.
        layers_name: name of the layer list inside it.
        family: what the family does around its layers.
    """

    model: PreTrainedModel
    decoder: nn.Module
    decoder_path: str
    layers_name: str
    family: Family

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Skeleton:
        """Build the map of ``config``'s model.

        Raises:
            SpecError: the model is not a plain decoder.
        """
        model = _one_layer_model(config)
        lists = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
        if not lists:
            raise SpecError(f"model family {config.model_type}: found no list of decoder layers")
        decoder_path, _, layers_name = min(lists, key=lambda name: name.count(".")).rpartition(".")
        skeleton = cls(
            model=model,
            decoder=model.get_submodule(decoder_path),
            decoder_path=decoder_path,
            layers_name=layers_name,
            family=family_of(config.model_type),
        )
        skeleton._refuse_unknown_parts(config.model_type)
        skeleton._refuse_unknown_scales(config)
        return skeleton

    @property
    def layer_class(self) -> type[nn.Module]:
        """The decoder layer class of transformers."""
        layers = self.decoder.get_submodule(self.layers_name)
        assert isinstance(layers, nn.ModuleList)
        return type(layers[0])

    @property
    def head_path(self) -> str:
        """Where the LM head is, such as ``lm_head``."""
        head = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        names: dict[nn.Module, str] = {part: name for name, part in self.model.named_modules()}
        return names[head]

    @property
    def known_parts(self) -> tuple[str, ...]:
        """Names in ``decoder`` of what the master runs."""
        family = self.family
        names = (
            family.embedding,
            family.positions,
            family.project_in,
            family.embedding_norm,
            family.final_norm,
            family.project_out,
        )
        return tuple(name for name in names if name is not None)

    def _refuse_unknown_parts(self, model_type: str) -> None:
        """Weights that nothing here would run mean silently wrong answers: refuse them."""
        absent = [name for name in self.known_parts if not hasattr(self.decoder, name)]
        if absent:
            raise SpecError(
                f"model family {model_type}: found no '{absent[0]}' in "
                f"{type(self.decoder).__name__}, expected the parts of a plain decoder"
            )
        prefix = f"{self.decoder_path}." if self.decoder_path else ""
        places = {prefix + name for name in (*self.known_parts, self.layers_name)}
        places.add(self.head_path)
        for name, _ in self.model.named_parameters():
            if not any(name.startswith(f"{place}.") for place in places):
                raise SpecError(
                    f"model family {model_type}: weight '{name}' is outside the layers, the "
                    "embedding, the final norm and the head, so it cannot run as a pipeline"
                )

    def _refuse_unknown_scales(self, config: PreTrainedConfig) -> None:
        """The same field multiplies in one family and divides in another: only entries tell."""
        family = self.family
        applied = {family.embedding_multiplier, family.logits_multiplier, family.logits_divisor}
        for field in set(SCALES) - applied:
            value = getattr(config, field, None)
            if value is not None and value != 1:
                raise SpecError(
                    f"model family {config.model_type}: nothing here applies its field "
                    f"'{field}' = {value}, so its answers would be wrong"
                )


def _one_layer_model(config: PreTrainedConfig) -> PreTrainedModel:
    model_type = config.model_type
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None or config.is_encoder_decoder:
        raise SpecError(f"model family {model_type}: expected a decoder-only language model")
    small = copy.deepcopy(config)
    try:
        small.num_hidden_layers = 1
        if getattr(small, "layer_types", None):
            small.layer_types = list(small.layer_types)[:1]
        with torch.device("meta"):
            model = model_class._from_config(small)
    except Exception as error:  # a configuration can break a model's constructor in any way
        raise SpecError(f"model family {model_type}: cannot be built: {error}") from error
    assert isinstance(model, PreTrainedModel)
    model.train(False)
    return model


def build_layer(config: PreTrainedConfig, index: int) -> nn.Module:
    """Build transformers' own decoder layer ``index``, unchanged, on the meta device.

    Args:
        config: from :func:`load_config`.
        index: its place in the whole model, ``0 <= index < num_hidden_layers``.

    Raises:
        SpecError: ``index`` is not a layer of the model.
    """
    if not 0 <= index < config.num_hidden_layers:
        raise SpecError(f"layer {index}: expected one of [0, {config.num_hidden_layers})")
    with torch.device("meta"):
        layer = Skeleton.of(config).layer_class(config, index)
    return layer.eval().requires_grad_(False)


def build_rotary(config: PreTrainedConfig) -> nn.Module | None:
    """Build the family's rotary embedding with real buffers, or ``None`` when it has none."""
    template = getattr(Skeleton.of(config).decoder, "rotary_emb", None)
    if template is None:
        return None
    rotary: nn.Module = type(template)(config)
    return rotary.eval()


def takes(function: object, argument: str) -> bool:
    """Whether a module's ``forward`` names ``argument``."""
    return argument in inspect.signature(function).parameters  # type: ignore[arg-type]


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
