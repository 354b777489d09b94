"""Adapter to transformers: configuration, skeleton and layers of a decoder-only model.

Configurations are read and checked without running code of the model directory. The attention
window and the KV shape of a layer follow from the configuration.

``Skeleton`` is a copy of the model on the meta device, of one layer where possible (milliseconds,
no memory), which shows its classes and module paths. Encoder-decoder models, hybrids without
attention and models with parts outside a pipeline of equal layers raise an error. The modules
around the decoder layers have the names of the family's record, by default those of Llama:
``embed_tokens``, ``layers``, ``norm``, ``lm_head``, rotary embeddings.

Most families keep the experts of a layer as ``gate_up_proj`` ``[E, 2F, H]`` and ``down_proj``
``[E, H, F]``, outputs first, and get the experts of each token as arguments. The modules of
other families are replaced by modules of that layout, as their records say, and quantized like it.

Shapes: T tokens, E experts, k experts of a token, H hidden, F features of an expert.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.moe import use_experts_implementation
from transformers.pytorch_utils import Conv1D

from llmpq.errors import SpecError, bad_field
from llmpq.logging import get_logger
from llmpq.models.attention import KVShape
from llmpq.models.states import DECAYS, is_mixer
from llmpq.spec.families import (
    DEFAULT_MODEL_TYPE,
    Family,
    ModelParts,
    OwnModule,
    family_of,
    known_families,
)
from llmpq.spec.huggingface.windows import BOTH, CHUNKED, FEED_FORWARD, FULL, LINEAR, SLIDING
from llmpq.spec.model_files.config import CONFIG_FILE, language_fields, model_fields

_logger = get_logger(__name__)

MAX_LAYERS = 10_000
_PLANNED = "others do not run; llmpq-profile describe plans some of them"
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
    """A model without weights, with one layer of a class where the parts around them allow it.

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

    def layer_class(self, config: PreTrainedConfig, index: int) -> type[nn.Module]:
        """Return the class of transformers that decoder layer ``index`` has."""
        layers = self.decoder.get_submodule(self.layers_name)
        assert isinstance(layers, nn.ModuleList)
        if not self.family.has_layer_classes:
            return type(layers[0])
        built: list[str] = list(self.model.config.layer_types)
        return type(layers[built.index(config.layer_types[index])])

    def build_layer(self, config: PreTrainedConfig, index: int) -> nn.Module:
        """Build decoder layer ``index`` of transformers on the meta device, constants for real."""
        with torch.device("meta"), _QuickConstruction():
            kind = self.layer_class(config, index)
            taken = inspect.signature(kind).parameters  # of Bamba, a default for any layer
            named = {"layer_type": config.layer_types[index]} if "layer_type" in taken else {}
            layer = kind(config, index, **named)
        _use_linear(layer)
        use_stacked_experts(layer, config)
        for name, what in self.family.own_modules:
            if what in _SETTERS:
                _SETTERS[what](config, layer.get_submodule(name))
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
            raise bad_field(
                CONFIG_FILE,
                "model_type",
                model_type,
                f"a family that runs: found no '{absent[0]}' in {type(self.decoder).__name__}, "
                f"which has other parts than a plain decoder; {_PLANNED}",
            )
        prefix = f"{self.decoder_path}." if self.decoder_path else ""
        places = {prefix + name for name in (*self.known_parts, self.layers_name)}
        places.add(self.head_path)
        for name, _ in self.model.named_parameters():
            if not any(name.startswith(f"{place}.") for place in places):
                raise bad_field(
                    CONFIG_FILE,
                    "model_type",
                    model_type,
                    f"a family that runs: weight '{name}' is outside the layers, the embedding, "
                    f"the final norm and the head; {_PLANNED}",
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
        for field in (one for one in SCALES if one not in applied):
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
            every = list(getattr(small, "layer_types", None) or ())
            kinds = every[:1]
            if family_of(model_type).has_layer_classes:
                kinds = list(dict.fromkeys(every))
            small.num_hidden_layers = max(1, len(kinds))
            if kinds:
                try:
                    small.layer_types = kinds
                except AttributeError:  # computed from their number: up to the first of the last
                    small.num_hidden_layers = max(map(every.index, kinds)) + 1
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


@cache
def default_norm() -> type[nn.Module]:
    """Return the class of the norms in the family that all records are compared with."""
    config = AutoConfig.for_model(DEFAULT_MODEL_TYPE)
    return type(Skeleton.of(config).decoder.get_submodule(ModelParts().final_norm))


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


@use_experts_implementation
class StackedExperts(nn.Module):
    """Experts on the meta device; transformers' implementation runs them.

    Attributes:
        is_stored_transposed: whether files have inputs before outputs.

    Args:
        config: of the model, from which transformers reads the implementation.
        sizes: E, F and H.
        dtype: of the weights.
        act_fn: applied to the gate.
    """

    is_stored_transposed = False

    def __init__(
        self,
        config: PreTrainedConfig,
        sizes: tuple[int, int, int],
        dtype: torch.dtype,
        act_fn: nn.Module,
    ) -> None:
        del config  # read by the decorator
        super().__init__()
        self.gate_up_proj, self.down_proj = _stacks(*sizes, dtype)
        self.num_experts, self.act_fn = sizes[0], act_fn

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, ``[T, H]``.

        Args:
            hidden_states: ``[T, H]``.
            top_k_index: expert of each choice, ``[T, k]``.
            top_k_weights: its weight, ``[T, k]``.
        """
        return _run_one_by_one(self, hidden_states, top_k_index, top_k_weights)


@use_experts_implementation(has_bias=True, is_concatenated=False)
class BiasedExperts(nn.Module):
    """Experts of gpt_oss: biases, and the outputs of gate and up in turn.

    Attributes:
        is_stored_transposed: as in ``StackedExperts``.
        has_common_layout: as in ``RoutedExperts``.

    Args:
        config: of the model.
        experts: the module of transformers.
    """

    is_stored_transposed = True
    has_common_layout = False

    def __init__(self, config: PreTrainedConfig, experts: Any) -> None:
        del config  # read by the decorator
        super().__init__()
        count, features, hidden = experts.down_proj.shape
        self.gate_up_proj, self.down_proj = _stacks(
            count, features, hidden, experts.down_proj.dtype
        )
        self.gate_up_proj_bias: nn.Parameter = experts.gate_up_proj_bias
        self.down_proj_bias: nn.Parameter = experts.down_proj_bias
        self.num_experts = count
        self.act_fn = ClampedGate(experts.alpha, experts.limit)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gated: Tensor = self.act_fn(gate_up)
        return gated

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts; as ``StackedExperts.forward``."""
        return _run_one_by_one(self, hidden_states, top_k_index, top_k_weights)


class ClampedGate(nn.Module):
    """The gate of gpt_oss, applied to both outputs of the first matrix.

    Args:
        alpha: factor inside the sigmoid.
        limit: largest magnitude of either output.
    """

    def __init__(self, alpha: float, limit: float) -> None:
        super().__init__()
        self.alpha, self.limit = alpha, limit

    def forward(self, gate_up: Tensor) -> Tensor:
        """Return ``[..., F]`` from ``[..., 2F]``, whose features are of gate and up in turn."""
        gate = gate_up[..., ::2].clamp(max=self.limit)
        up = gate_up[..., 1::2].clamp(min=-self.limit, max=self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


class ScaledExperts(nn.Module):
    """The feed-forward of Llama 4 with experts: scores weigh the inputs of a token's experts.

    transformers runs every token through every expert, most of them on zeros.

    Args:
        config: of the model.
        mixture: the module of transformers.
    """

    def __init__(self, config: PreTrainedConfig, mixture: Any) -> None:
        super().__init__()
        own = mixture.experts
        count, features, hidden = own.down_proj.shape
        self.experts = StackedExperts(
            config, (count, features, hidden), own.down_proj.dtype, own.act_fn
        )
        self.experts.is_stored_transposed = True
        self.router = mixture.router
        self.shared_expert = mixture.shared_expert

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``[T, H]`` from ``[..., H]``, and the scores of the router ``[T, E]``."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = self.router(tokens)
        weights, experts = scores.topk(self.router.top_k, dim=1)  # [T, k]
        inputs = (tokens[:, None] * weights[..., None]).flatten(0, 1)  # [T * k, H]
        index = experts.reshape(-1, 1)
        routed: Tensor = self.experts(inputs, index, torch.ones_like(index, dtype=inputs.dtype))
        shared: Tensor = self.shared_expert(tokens)
        return shared + routed.view(*experts.shape, -1).sum(1), logits


class RoutedExperts(nn.Module):
    """The feed-forward of DBRX: a router, and experts in the usual layout.

    Attributes:
        has_common_layout: whether other libraries store the experts one by one.

    Args:
        config: of the model.
        mixture: the module of transformers.
    """

    has_common_layout = False

    def __init__(self, config: PreTrainedConfig, mixture: Any) -> None:
        super().__init__()
        own = mixture.experts
        sizes = own.num_experts, own.ffn_hidden_size, own.hidden_size
        self.experts = StackedExperts(config, sizes, own.mlp.w1.dtype, own.mlp.activation_fn)
        self.router = mixture.router
        self.top_k: int = mixture.top_k
        self.moe_normalize_expert_weights = mixture.moe_normalize_expert_weights
        self._choose = type(mixture).route_tokens_to_experts

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the output of the experts, in the shape of ``hidden_states`` ``[..., H]``."""
        weights, experts = self._choose(self, self.router(hidden_states))
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        output: Tensor = self.experts(tokens, experts, weights)
        return output.view(hidden_states.shape)


def set_input_factors(config: PreTrainedConfig, mixer: Any) -> None:
    """Give a mixer of Falcon-H1 the factors of its inputs, which its model computes for all."""
    states = mixer.n_groups * mixer.ssm_state_size
    widths = (mixer.intermediate_size, mixer.intermediate_size, states, states, mixer.num_heads)
    parts = zip(widths, config.ssm_multipliers, strict=True)
    factors = torch.cat([torch.full((width,), float(factor)) for width, factor in parts])
    mixer.register_buffer("mup_vector", factors[None, None], persistent=False)


def set_decays(config: PreTrainedConfig, attention: Any) -> None:
    """Keep of the constants of lightning attention (MiniMax) the decay of each head alone.

    transformers keeps tables of them, of megabytes a layer; attention of other layers has none.
    """
    del config
    if hasattr(attention, "slope_rate"):
        with torch.device("cpu"):
            setattr(attention, DECAYS, tuple(attention.get_slope_rate().flatten().tolist()))
        for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay"):
            delattr(attention, name)


_SETTERS: dict[OwnModule, Callable[[PreTrainedConfig, Any], None]] = {
    "decays": set_decays,
    "input_factors": set_input_factors,
}


_OWN: dict[OwnModule, Callable[[PreTrainedConfig, Any], nn.Module]] = {
    "biased_experts": BiasedExperts,
    "routed_experts": RoutedExperts,
    "scaled_experts": ScaledExperts,
}


def use_stacked_experts(layer: nn.Module, config: PreTrainedConfig) -> None:
    """Replace the experts of a layer on the meta device by modules of the usual layout."""
    for name, kind in family_of(config.model_type).own_modules:
        make, part = _OWN.get(kind), layer.get_submodule(name)
        is_dense = kind == "scaled_experts" and not hasattr(part, "experts")
        if make is not None and not is_dense:
            layer.set_submodule(name, make(config, part))


def _stacks(
    count: int, features: int, hidden: int, dtype: torch.dtype
) -> tuple[nn.Parameter, nn.Parameter]:
    """Return ``[E, 2F, H]`` and ``[E, H, F]`` without memory."""
    return (
        nn.Parameter(torch.empty(count, 2 * features, hidden, dtype=dtype, device="meta")),
        nn.Parameter(torch.empty(count, hidden, features, dtype=dtype, device="meta")),
    )


def _run_one_by_one(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Run experts one after the other, as transformers does without another implementation."""
    output = torch.zeros_like(hidden)
    for expert in range(experts.num_experts):
        token, choice = torch.where(index == expert)
        biases = [getattr(experts, f"{name}_bias", None) for name in ("gate_up_proj", "down_proj")]
        first, last = (None if bias is None else bias[expert] for bias in biases)
        values = nn.functional.linear(hidden[token], experts.gate_up_proj[expert], first)
        values = nn.functional.linear(experts._apply_gate(values), experts.down_proj[expert], last)
        output.index_add_(0, token, (values * weights[token, choice, None]).to(output.dtype))
    return output


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
    # Residuals have the format of the run everywhere, as between stages.
    if getattr(prepared, "residual_in_fp32", False):
        prepared.residual_in_fp32 = False
    skeleton = Skeleton.of(prepared)
    chosen = skeleton.model.config
    prepared._attn_implementation = chosen._attn_implementation
    if hasattr(chosen, "_experts_implementation"):
        prepared._experts_implementation = chosen._experts_implementation
    if family.sizes is None and has_states(prepared):
        _check_states(prepared, skeleton)
    return prepared, skeleton


def _check_states(config: PreTrainedConfig, skeleton: Skeleton) -> None:
    """Raise an error for a layer whose state is not where the caches of transformers have it."""
    kinds: Sequence[str] = config.layer_types
    for index in sorted({kinds.index(kind) for kind in LINEAR if kind in kinds}):
        layer = skeleton.build_layer(config, index)
        parts: list[Any] = [type(part) for part in layer.modules()]
        if sum(map(is_mixer, parts)) != 1:
            raise bad_field(
                CONFIG_FILE,
                f"layer_types[{index}]",
                kinds[index],
                f"a layer with one module that keeps a state of transformers' caches, which "
                f"{type(layer).__name__} has not; {_PLANNED}",
            )


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
    if family_of(config.model_type).sizes is None:
        _check_attention(config)


def _check_attention(config: PreTrainedConfig) -> None:
    """Raise an error for attention that no known family has, before anything is computed."""
    count, layers = config.num_hidden_layers, getattr(config, "num_layers", None)
    if layers not in (None, count):
        message = f"{count}, one attention a layer; {_PLANNED}"
        raise bad_field(CONFIG_FILE, "num_layers", layers, message)
    value_dim = getattr(config, "v_head_dim", None)
    if value_dim is not None and not has_latent_attention(config):
        head_dim = getattr(config, "head_dim", None) or value_dim
        if value_dim != head_dim:
            message = f"{head_dim}, as a key; {_PLANNED}"
            raise bad_field(CONFIG_FILE, "v_head_dim", value_dim, message)
    rotations = getattr(config, "rope_parameters", None) or {}
    for kind in sorted(set(getattr(config, "layer_types", None) or ()) & set(rotations)):
        if rotations[kind] is None:
            name = f"rope_parameters.{kind}"
            raise bad_field(CONFIG_FILE, name, None, f"parameters of a rotation; {_PLANNED}")


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
            others = " and ".join(one.name for one in known_families() if one.sends_more)
            raise SpecError(
                f"model family {config.model_type}: field '{field}' = {value}: {reason}, which "
                f"stages send on for {others} only; such a model is planned, not run"
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
    if kind == SLIDING:
        return window
    if kind in (FULL, CHUNKED, *LINEAR, *FEED_FORWARD):
        return None
    if kind == BOTH and family_of(config.model_type).sizes is not None:
        return None
    known = ", ".join((FULL, SLIDING, CHUNKED, *LINEAR, *FEED_FORWARD))
    raise bad_field(
        CONFIG_FILE,
        f"layer_types[{index}]",
        kind,
        f"one of {known} in a model of type {config.model_type}; {_PLANNED}",
    )


def keeps_state(config: PreTrainedConfig, index: int) -> bool:
    """Return whether a layer has a recurrent state, in place of keys and values or beside them."""
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ()
    return bool(kinds) and kinds[index] in (*LINEAR, BOTH)


def keeps_keys(config: PreTrainedConfig, index: int) -> bool:
    """Return whether a layer has keys and values."""
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ()
    return not kinds or kinds[index] not in (*LINEAR, *FEED_FORWARD)


def has_states(config: PreTrainedConfig) -> bool:
    """Return whether layers of a model have a recurrent state."""
    return any(keeps_state(config, index) for index in range(config.num_hidden_layers))


def layer_chunk(config: PreTrainedConfig, index: int) -> int | None:
    """Return the size of the chunks that attend to themselves in layer ``index`` (Llama 4).

    Returns:
        ``None`` for a layer without chunks.

    Raises:
        SpecError: the layer has chunks and the configuration has no size of them.
    """
    layer_types = getattr(config, "layer_types", None)
    if not layer_types or layer_types[index] != CHUNKED:
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
    if not keeps_keys(config, index):
        return KVShape(heads=0, head_dim=0)
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
        sizes = {"head_dim": config.kv_lora_rank, "value_dim": config.qk_rope_head_dim}
        return KVShape(heads=1, **sizes, is_latent=True)
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
