"""The default behaviour: how a decoder-only model of transformers comes apart into layers.

A one-layer copy of the model on the meta device (milliseconds, no memory) tells what its classes
are and where they sit; nothing is imported from a model directory, and no weight is made here.
Encoder-decoder models, hybrids without attention and models with parts that have no place in a
pipeline of equal layers are refused by name rather than run wrongly.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from llmpq.errors import SpecError
from llmpq.models.families import Family, family_of

# Configuration fields that scale embeddings or logits in some family.
SCALES = (
    "embedding_multiplier",
    "lm_head_multiplier",
    "logit_scale",
    "logits_scaling",
    "scale_emb",
)


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


def build_rotary(config: PreTrainedConfig, skeleton: Skeleton | None = None) -> nn.Module | None:
    """Build the family's rotary embedding with real buffers, or ``None`` when it has none.

    Args:
        config: from :func:`load_config`.
        skeleton: of ``config``, where the caller has it; else it is made.
    """
    template = getattr((skeleton or Skeleton.of(config)).decoder, "rotary_emb", None)
    if template is None:
        return None
    rotary: nn.Module = type(template)(config)
    return rotary.eval()


def takes(function: object, argument: str) -> bool:
    """Whether a module's ``forward`` names ``argument``."""
    return argument in inspect.signature(function).parameters  # type: ignore[arg-type]
