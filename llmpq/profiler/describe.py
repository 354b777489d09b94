"""Describe a model family that the planner's table lacks: sizes read from the model itself.

The model is built on torch's meta device, without memory or weights. Operators are its linear
modules and stacked experts; what a token leaves in the cache is what transformers' own cache holds
after a forward pass on that device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from llmpq.errors import SpecError
from llmpq.models.adapter import kv_sources, read_config, use_stacked_experts
from llmpq.models.master import layout_of
from llmpq.quant.modules.layer import has_plain_experts, is_router
from llmpq.spec.huggingface.config import SCALING, Config
from llmpq.spec.huggingface.sizes import positions_of
from llmpq.spec.model import LayerSpec, LinearSpec, ModelSpec
from llmpq.spec.model_files.config import (
    CONFIG_FILE,
    absolute_model_path,
    language_fields,
    model_fields,
)
from llmpq.spec.precision import Dtype

_TOKENS = 3
"""Tokens of the forward pass."""


def describe_dir(model_dir: Path) -> ModelSpec:
    """Return the sizes of the model of a directory; it is named after the directory.

    Raises:
        SpecError: as :func:`describe` and ``read_config``.
    """
    fields, file = model_fields(model_dir), str(model_dir / CONFIG_FILE)
    config = read_config(fields, file)
    dtype = Config(language_fields(fields), file).dtype()
    return describe(config.get_text_config(), absolute_model_path(model_dir).name, dtype)


def describe(config: PreTrainedConfig, name: str, dtype: Dtype) -> ModelSpec:
    """Return the sizes of the language model of ``config``.

    Args:
        config: of transformers.
        name: of the model.
        dtype: of its checkpoint.

    Raises:
        SpecError: transformers cannot build or run it on the meta device, or it is not a list of
            decoder layers between an embedding and a head.
    """
    model = _build(config)
    path, layers = _decoder_layers(model, config.model_type)
    for part in layers:
        use_stacked_experts(part, model.config)
    cached = _cached(model, config)
    found = [
        _layer(layer, config, cached[index if source is None else source], source)
        for index, (layer, source) in enumerate(zip(layers, kv_sources(config), strict=True))
    ]
    kinds = tuple(dict.fromkeys(found))
    head = model.get_output_embeddings()
    is_tied = head.weight is model.get_input_embeddings().weight
    head_bias = 0 if head.bias is None else head.bias.numel()
    head_parameters = head_bias + (0 if is_tied else head.weight.numel())
    in_layers = sum(parameter.numel() for parameter in layers.parameters())
    total = sum(parameter.numel() for parameter in model.parameters())
    final = _final_parameters(model, path)
    layout = layout_of(config)
    return ModelSpec(
        name=name,
        family=config.model_type,
        hidden_size=config.hidden_size,
        vocab_size=head.weight.shape[0],
        head_in_features=head.weight.shape[1],
        max_positions=positions_of(
            Config({field: getattr(config, field, None) for field in SCALING}, CONFIG_FILE)
        ),
        layer_types=kinds,
        layer_kinds=tuple(kinds.index(layer) for layer in found),
        embedding_parameters=total - in_layers - head_parameters - final,
        final_parameters=final,
        head_parameters=head_parameters,
        dtype=dtype,
        sent_features=None if layout is None else layout.features,
    )


def _build(config: PreTrainedConfig) -> Any:
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None or config.is_encoder_decoder:
        raise SpecError(f"model family {config.model_type}: expected a decoder-only language model")
    try:
        with torch.device("meta"):
            # Other implementations read the mask of OPT on the host in transformers 5.17.
            model = model_class._from_config(config, attn_implementation="eager")
    except Exception as error:  # a configuration can break a model's constructor in any way
        raise SpecError(f"model family {config.model_type}: cannot be built: {error}") from error
    return model.eval()


def _decoder_layers(model: nn.Module, model_type: str) -> tuple[str, nn.ModuleList]:
    lists = [
        (name, part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList)
    ]
    if not lists:
        raise SpecError(f"model family {model_type}: found no list of decoder layers")
    return min(lists, key=lambda item: item[0].count("."))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cached:
    """What a layer's cache holds of each token, and of a sequence whatever its length."""

    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    state_values: int = 0


def _cached(model: Any, config: PreTrainedConfig) -> list[_Cached]:
    """Run tokens through the model on the meta device; return what each layer's cache holds."""
    for part in model.modules():  # the other implementations read the routing on the host
        own: Any = getattr(part, "config", None)
        if hasattr(own, "_experts_implementation"):
            own._experts_implementation = "batched_mm"
        if hasattr(
            part, "activation_sparsity"
        ):  # of Gemma 3n: it changes no size, but reads a value
            part.activation_sparsity = 0.0
    tokens = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), torch.device("meta"):
            output = model(input_ids=tokens, use_cache=True)
    except Exception as error:  # models read values, which the meta device has not, in many ways
        raise SpecError(
            f"model family {config.model_type}: cannot run on the meta device, so its cache is not "
            f"known: {error}"
        ) from error
    cache = next(
        (output[name] for name in ("past_key_values", "cache_params") if output.get(name)), None
    )
    layers = getattr(cache, "layers", ())
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    if len(layers) == config.num_hidden_layers - shared:  # transformers 5.17 leaves them out
        layers = [*layers, *[None] * shared]
    apart = getattr(cache, "linear_cache", ())  # MiniMax keeps its states apart
    if len(apart) == config.num_hidden_layers:  # layers behind the last attention are not there
        layers = [*layers, *[None] * (len(apart) - len(layers))]
    if len(layers) != config.num_hidden_layers:
        raise SpecError(
            f"model family {config.model_type}: found a cache of {len(layers)} layers, expected "
            f"{config.num_hidden_layers}"
        )
    states = [*apart, *[None] * (len(layers) - len(apart))]
    return [_of_cache(layer, state) for layer, state in zip(layers, states, strict=True)]


def _of_cache(layer: Any, apart: object) -> _Cached:
    held = (getattr(layer, name, None) for name in ("conv_states", "recurrent_states"))
    states = [state for value in (*held, apart) for state in _tensors(value)]
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    state_values = sum(state.numel() for state in states)
    if keys is None or values is None or keys.dim() != 4:
        return _Cached(state_values=state_values)
    return _Cached(
        heads=keys.shape[1],
        key_dim=keys.shape[3],
        value_dim=values.shape[3],
        window=getattr(layer, "sliding_window", None),
        state_values=state_values,
    )


def _tensors(value: object) -> list[torch.Tensor]:
    items = list(value.values()) if isinstance(value, dict) else [value]
    return [item for item in items if isinstance(item, torch.Tensor)]


def _layer(
    layer: nn.Module, config: PreTrainedConfig, cached: _Cached, source: int | None
) -> LayerSpec:
    linears = tuple(_linears(layer, config))
    counted = sum(op.weight_parameters + op.bias_parameters for op in linears)
    has_heads = cached.heads > 0
    return LayerSpec(
        linears=linears,
        norm_parameters=sum(p.numel() for p in layer.parameters()) - counted,
        num_heads=config.num_attention_heads if has_heads else 0,
        num_kv_heads=cached.heads,
        head_dim=cached.key_dim,
        sliding_window=cached.window,
        value_dim=None if cached.value_dim == cached.key_dim else cached.value_dim,
        state_values=cached.state_values,
        kv_source=source,
    )


def _linears(layer: nn.Module, config: PreTrainedConfig) -> Iterator[LinearSpec]:
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            yield _linear(name, module, *module.weight.shape)
        elif isinstance(module, Conv1D):  # GPT-2 stores its weights transposed
            yield _linear(name, module, *module.weight.shape[::-1])
        else:
            yield from _stacked(name, module, config)


def _linear(name: str, module: Any, out_features: int, in_features: int) -> LinearSpec:
    return LinearSpec(
        name=name,
        out_features=out_features,
        in_features=in_features,
        bias=module.bias is not None,
        quantizable=not is_router(name),
    )


def _stacked(name: str, module: Any, config: PreTrainedConfig) -> Iterator[LinearSpec]:
    """Yield the stacked matrices of experts, and the matrix of a router that is not a linear."""
    own = dict(module.named_parameters(recurse=False))
    for key, parameter in own.items():
        path = f"{name}.{key}" if key != "weight" else name
        bias = own.get(f"{key}_bias")
        if parameter.dim() == 3 and "conv" not in name:
            count, rows, columns = parameter.shape
            if getattr(module, "is_transposed", False):  # inputs before outputs
                rows, columns = columns, rows
            yield LinearSpec(
                name=path,
                out_features=rows,
                in_features=columns,
                count=count,
                active=_experts_per_token(config),
                bias=bias is not None,
                quantizable=has_plain_experts(module),
            )
        elif key == "weight" and parameter.dim() == 2 and is_router(name):
            bias = own.get("bias")
            yield LinearSpec(
                name=name,
                out_features=parameter.shape[0],
                in_features=parameter.shape[1],
                bias=bias is not None,
                quantizable=False,
            )


def _experts_per_token(config: PreTrainedConfig) -> int:
    own: Any = getattr(config, "ffn_config", None)  # DBRX
    if own is not None:
        return int(own.moe_top_k)
    names = ("num_experts_per_tok", "top_k_experts")
    return next(int(count) for name in names if (count := getattr(config, name, None)))


def _final_parameters(model: nn.Module, path: str) -> int:
    """Return the parameters of the decoder behind the list of layers."""
    parent, _, last = path.rpartition(".")
    names = [name for name, _ in model.get_submodule(parent).named_children()]
    behind = names[names.index(last) + 1 :]
    parts = [model.get_submodule(f"{parent}.{name}" if parent else name) for name in behind]
    return sum(p.numel() for part in parts for p in part.parameters())
