"""Skeleton: the parts of a decoder-only model of transformers.

A copy of the model on the meta device, of one layer where possible (milliseconds, no memory), shows
its classes and module paths. No code of a model directory is imported. Encoder-decoder models,
hybrids without attention and models with parts outside a pipeline of equal layers raise an error.

The modules around the decoder layers have the names of the family's record, by default those of
Llama: ``embed_tokens``, ``layers``, ``norm``, ``lm_head``, rotary embeddings.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llmpq.errors import SpecError
from llmpq.models.expert_layouts import use_stacked_experts
from llmpq.spec.families import Family, family_of

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
    """A model without weights, with one layer where the parts around the layers allow it.

    Attributes:
        model: the whole model on the meta device.
        decoder: submodule that contains the layers.
        decoder_path: path of ``decoder``, such as ``model.decoder``.
        layers_name: name of the layer list in ``decoder``.
        family: the family of the model.
    """

    model: PreTrainedModel
    decoder: nn.Module
    decoder_path: str
    layers_name: str
    family: Family

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Skeleton:
        """Build the skeleton of the model of ``config``.

        Raises:
            SpecError: the model is not a plain decoder.
        """
        model = _small_model(config)
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
        skeleton._reject_unknown_parts(config.model_type)
        skeleton._reject_unknown_scales(config)
        return skeleton

    @property
    def layer_class(self) -> type[nn.Module]:
        """The decoder layer class of transformers."""
        layers = self.decoder.get_submodule(self.layers_name)
        assert isinstance(layers, nn.ModuleList)
        return type(layers[0])

    def build_layer(self, config: PreTrainedConfig, index: int) -> nn.Module:
        """Build decoder layer ``index`` of transformers on the meta device, constants for real."""
        with torch.device("meta"), _QuickConstruction():
            layer = self.layer_class(config, index)
        _use_linear(layer)
        use_stacked_experts(layer, config)
        stored = layer.state_dict().keys()
        for module_name, module in layer.named_modules():
            start = f"{module_name}." if module_name else ""
            own = [name for name, _ in module.named_buffers(recurse=False)]
            if any(start + name not in stored for name in own):
                fill_constants(module, self.model)
        return layer.eval().requires_grad_(False)

    @property
    def head_path(self) -> str:
        """Path of the LM head, such as ``lm_head``."""
        head = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        names: dict[nn.Module, str] = {part: name for name, part in self.model.named_modules()}
        return names[head]

    @property
    def known_parts(self) -> tuple[str, ...]:
        """Names of the submodules of ``decoder`` that the master runs."""
        family = self.family.parts
        names = (
            family.embedding,
            family.positions,
            family.project_in,
            family.embedding_norm,
            family.final_norm,
            family.project_out,
        )
        optional = (*family.own_embeddings, *family.streams)
        return (
            *(name for name in names if name is not None),
            *(name for name in optional if hasattr(self.decoder, name)),
        )

    def _reject_unknown_parts(self, model_type: str) -> None:
        """Raise an error for weights outside the known parts: they would be ignored silently."""
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

    def _reject_unknown_scales(self, config: PreTrainedConfig) -> None:
        """Raise an error for scales that the family entry does not apply."""
        family = self.family.parts
        applied = {
            family.embedding_multiplier,
            family.logits_multiplier,
            family.logits_divisor,
            *family.applied_scales,
        }
        for field in set(SCALES) - applied:
            value = getattr(config, field, None)
            if value is not None and value != 1:
                raise SpecError(
                    f"family {config.model_type}: field '{field}' = {value} is not supported, "
                    "expected 1 or no such field"
                )


class _QuickConstruction(TorchFunctionMode):
    """Keeps the construction of modules on the meta device from importing torch's compiler.

    torch has no meta kernel of random numbers and of ``arange``: it imports the compiler for them,
    which takes a second. Random numbers have no effect there, and ``arange``, from which
    frequencies of positions are computed, runs on the CPU.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("normal_", "uniform_"):
            tensor = args[0] if args else given["tensor"]
            if tensor.is_meta:
                return tensor
        if name == "arange":
            given = {"device": "cpu", **given}
        return func(*args, **given)


def _small_model(config: PreTrainedConfig) -> PreTrainedModel:
    model_type = config.model_type
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None or config.is_encoder_decoder:
        raise SpecError(f"model family {model_type}: expected a decoder-only language model")
    small = copy.deepcopy(config)
    try:
        # The tables of Gemma 3n and 4 have a part for every layer.
        has_own_embeddings = bool(getattr(small, "hidden_size_per_layer_input", None))
        if not has_own_embeddings:
            small.num_hidden_layers = 1
            if getattr(small, "layer_types", None):
                small.layer_types = list(small.layer_types)[:1]
            if getattr(small, "num_kv_shared_layers", None):
                small.num_kv_shared_layers = 0
        quick = contextlib.nullcontext() if has_own_embeddings else _QuickConstruction()
        with torch.device("meta"), quick:
            model = model_class._from_config(small)
    except Exception as error:  # a configuration can break a model's constructor in any way
        raise SpecError(f"model family {model_type}: cannot be built: {error}") from error
    assert isinstance(model, PreTrainedModel)
    model.train(False)
    return model


def build_layer(config: PreTrainedConfig, index: int) -> nn.Module:
    """Build decoder layer ``index`` of transformers on the meta device.

    Args:
        config: configuration from :func:`load_config`.
        index: index in the whole model, ``0 <= index < num_hidden_layers``.

    Raises:
        SpecError: ``index`` is not a layer of the model.
    """
    if not 0 <= index < config.num_hidden_layers:
        raise SpecError(f"layer {index}: expected one of [0, {config.num_hidden_layers})")
    return Skeleton.of(config).build_layer(config, index)


class TransposedLinear(nn.Linear):
    """A linear operator whose weight a checkpoint stores as ``[inputs, outputs]`` (GPT-2)."""


def _use_linear(layer: nn.Module) -> None:
    """Replace the transposed linear operators of GPT-2 by usual ones."""
    for name, module in list(layer.named_modules()):
        if isinstance(module, Conv1D):
            inputs, outputs = module.weight.shape
            layer.set_submodule(name, TransposedLinear(inputs, outputs, device="meta"))


def fill_constants(part: nn.Module, model: PreTrainedModel) -> None:
    """Compute buffers that checkpoints do not store, such as Gemma's embedding scale.

    The initializer of transformers sets them. Parameters count as initialized, and nothing is
    computed on the meta device: random numbers there import torch's compiler, 77 MB.

    Raises:
        SpecError: the initializer leaves one of them unset.
    """
    for module in part.modules():
        names = [name for name, value in module.named_buffers(recurse=False) if value.is_meta]
        for name in names:
            unset = module.get_buffer(name)
            marker = _marker(unset.dtype)
            module._buffers[name] = torch.full(unset.shape, marker, dtype=unset.dtype)
        if names:
            for parameter in module.parameters(recurse=False):
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]
            model._init_weights(module)  # type: ignore[no-untyped-call]
        for name in names:
            value = module.get_buffer(name)
            if bool((value.isnan() | (value == _marker(value.dtype))).any()):
                raise SpecError(f"{type(module).__name__}: buffer '{name}' has no known value")


def _marker(dtype: torch.dtype) -> float:
    """Return a value that no constant has."""
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min


def accepts(function: object, argument: str) -> bool:
    """Whether ``function`` has a parameter ``argument``."""
    return argument in inspect.signature(function).parameters  # type: ignore[arg-type]
