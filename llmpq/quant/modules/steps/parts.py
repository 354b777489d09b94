"""What the modules of a decoder layer do, by their names in transformers.

All weights of a layer must belong to a module that is known here. How the modules are combined is
the ``LayerForm`` of the family. ``RotaryRows`` are cosines and sines of the tokens of a compiled
step.

Shapes: R rows (tokens), P positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llmpq.kernels.cpu.step import StepProgram, UnsupportedStepError
from llmpq.models import DecoderStage, PackedBatch
from llmpq.models.stage import RotaryTables
from llmpq.quant.modules.layer import DenseLinear, QuantExperts, QuantLinear

# Norms before and after attention, before and after the MLP; those of the most norms come first.
_NORMS: tuple[tuple[str | None, str | None, str | None, str | None], ...] = (
    (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
    ("input_layernorm", None, "post_attention_layernorm", None),
    ("input_layernorm", None, "pre_feedforward_layernorm", None),
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    ("ln_1", None, "ln_2", None),
    ("self_attn_layer_norm", None, "final_layer_norm", None),
    ("ln_attn", None, "ln_mlp", None),
    ("norm_1", None, "norm_2", None),
    ("input_layernorm", None, None, None),
    ("ln_1", None, None, None),
)
_ATTENTIONS = ("self_attn", "self_attention", "attention", "attn")
_PROJECTIONS = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_proj", "k_proj"),  # values are the keys
    ("qkv_proj",),
    ("query_key_value",),
    ("c_attn",),
    ("Wqkv",),
)
_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj")
_HEAD_NORMS = (
    ("q_norm", "k_norm", "v_norm"),
    ("q_layernorm", "k_layernorm"),
    ("query_layernorm", "key_layernorm"),
)
_MLPS = ("mlp.", "ffn.", "")
_MIXTURES = ("mlp", "block_sparse_moe", "ffn")
_ROUTERS = ("gate", "router")
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")
"""MLPs whose output is added to that of the experts of a mixture."""
_CORRECTION = "e_score_correction_bias"
"""Tensor of a router, or of the mixture, with a number for each expert."""
_UPS = (
    ("gate_proj", "up_proj"),
    ("gate_up_proj",),
    ("up_proj",),
    ("fc1",),
    ("c_fc",),
    ("fc_in",),
    ("dense_h_to_4h",),
)
_DOWNS = ("down_proj", "fc2", "c_proj", "fc_out", "dense_4h_to_h")
_ACTIVATIONS = ("act_fn", "act", "activation_fn", "gelu_impl")
_SCALAR = "layer_scalar"
"""Buffer of Gemma 4 that multiplies the output of a layer."""
_SINKS = "sinks"
"""Parameter of attention with one more score of each head (gpt_oss)."""
_POSITIONS = "embed_positions"
"""Buffer of GPT-J with the sines and cosines of all positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpParts:
    """Names of the modules of an MLP.

    Attributes:
        ups: gate and what it multiplies, or a single projection.
        has_gate: whether a single projection of ``ups`` makes gate and what it multiplies.
        activation: of the gate or the projection.
        down: after it.
    """

    ups: tuple[str, ...]
    has_gate: bool
    activation: str
    down: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureParts:
    """Names of the modules of a mixture of experts.

    Attributes:
        router: chooses experts.
        experts: a ``QuantExperts``.
        shared: added to the experts' sum.
        shared_gate: whose sigmoid multiplies what ``shared`` makes.
        correction: a number for each expert, of the router.
    """

    router: str
    experts: str
    shared: MlpParts | None
    shared_gate: str | None
    correction: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """Names of the modules of a layer by what they do.

    Attributes:
        norms: before and after attention, before and after the MLP.
        attention: the module of attention.
        projections: of queries, keys and values, of queries and keys, or a single one of all.
        output: after attention.
        head_norms: of queries, keys and values.
        mlp: the MLP, or the mixture in its place.
        multiplier: factor of what attention and MLP add to their input.
        scalar: factor of the output.
        sinks: one more score of each head, ``[H]``.
        positions: cosines and sines of the layer's own, ``[P, rotated features]``.
    """

    norms: tuple[str | None, str | None, str | None, str | None]
    attention: str
    projections: tuple[str, ...]
    output: str
    head_norms: tuple[str | None, str | None, str | None]
    mlp: MlpParts | MixtureParts
    multiplier: float
    scalar: float
    sinks: Tensor | None
    positions: Tensor | None


def parts_of(layer: nn.Module) -> LayerParts:
    """Return the modules of a layer.

    Raises:
        UnsupportedStepError: a module is missing, or one with weights is not known.
    """
    norms = next((names for names in _NORMS if _have(layer, "", names)), None)
    if norms is None:
        raise UnsupportedStepError("no norm of a known name")
    attention = _first(layer, "", [(name,) for name in _ATTENTIONS], "attention")[0]
    prefix = f"{attention}."
    head_norms = next((names for names in _HEAD_NORMS if _have(layer, prefix, names[:2])), ())
    found = LayerParts(
        norms=norms,
        attention=attention,
        projections=_first(layer, prefix, _PROJECTIONS, "projection of queries"),
        output=_first(layer, prefix, [(name,) for name in _OUTPUTS], "output of attention")[0],
        head_norms=_named_heads(layer, prefix, head_norms),
        mlp=_mixture_of(layer) or _mlp_of(layer),
        multiplier=float(getattr(layer, "residual_multiplier", 1.0)),
        scalar=float(layer.get_buffer(_SCALAR)) if _SCALAR in layer._buffers else 1.0,
        sinks=layer.get_submodule(attention)._parameters.get(_SINKS),
        positions=layer.get_submodule(attention)._buffers.get(_POSITIONS),
    )
    _check_weights(layer, found)
    _check_bounds(layer.get_submodule(attention))
    return found


def _mlp_of(layer: nn.Module) -> MlpParts:
    found = (mlp for mlp in _MLPS if any(_have(layer, mlp, (down,)) for down in _DOWNS))
    return _mlp_at(layer, next(found, "mlp."))


def _mlp_at(layer: nn.Module, prefix: str) -> MlpParts:
    ups = _first(layer, prefix, _UPS, "projection of the MLP")
    return MlpParts(
        ups=ups,
        has_gate=ups[0].endswith("gate_up_proj"),
        activation=_first(layer, prefix, [(name,) for name in _ACTIVATIONS], "activation")[0],
        down=_first(layer, prefix, [(name,) for name in _DOWNS], "output of the MLP")[0],
    )


def _mixture_of(layer: nn.Module) -> MixtureParts | None:
    """Return the mixture of experts in place of the MLP, if any."""
    names = (f"{mixture}.experts" for mixture in _MIXTURES)
    experts = next((name for name in names if _is_module(layer, name)), None)
    if experts is None:
        return None
    if not isinstance(layer.get_submodule(experts), QuantExperts):
        raise UnsupportedStepError(f"{type(layer.get_submodule(experts)).__name__} in '{experts}'")
    mixture = experts.removesuffix(".experts")
    routers = [(name,) for name in _ROUTERS]
    names = (f"{mixture}.{name}" for name in _SHARED)
    shared = next((name for name in names if _is_module(layer, name)), None)
    gate = f"{shared}_gate"
    return MixtureParts(
        router=_first(layer, f"{mixture}.", routers, "router")[0],
        experts=experts,
        shared=None if shared is None else _mlp_at(layer, f"{shared}."),
        shared_gate=gate if _is_module(layer, gate) else None,
        correction=_correction_of(layer.get_submodule(mixture)),
    )


def _correction_of(mixture: nn.Module) -> Tensor | None:
    tensors = itertools.chain(mixture.named_parameters(), mixture.named_buffers())
    found = (tensor for name, tensor in tensors if name.split(".")[-1] == _CORRECTION)
    correction = next(found, None)
    return None if correction is None else correction.detach().float().flatten()


def _have(layer: nn.Module, prefix: str, names: Sequence[str | None]) -> bool:
    return all(_is_module(layer, f"{prefix}{name}") for name in names if name is not None)


def _is_module(layer: nn.Module, name: str) -> bool:
    try:
        return isinstance(layer.get_submodule(name), nn.Module)
    except AttributeError:
        return False


def _first(
    layer: nn.Module, prefix: str, choices: Sequence[tuple[str, ...]], what: str
) -> tuple[str, ...]:
    for names in choices:
        if _have(layer, prefix, names):
            return tuple(f"{prefix}{name}" for name in names)
    raise UnsupportedStepError(f"no {what} of a known name")


def _named_heads(
    layer: nn.Module, prefix: str, names: Sequence[str]
) -> tuple[str | None, str | None, str | None]:
    found = [f"{prefix}{name}" if _have(layer, prefix, (name,)) else None for name in names]
    query, key, value = (*found, None, None, None)[:3]
    return query, key, value


def _check_weights(layer: nn.Module, parts: LayerParts) -> None:
    """Raise an error for weights that have no place in the step."""
    known = {*parts.norms, *parts.projections, parts.output, *parts.head_norms}
    below: tuple[str, ...] = ()  # prefixes of modules that are known as a whole
    placed = {_SCALAR, f"{parts.attention}.{_POSITIONS}", f"{parts.attention}.{_SINKS}"}
    mlp: MlpParts | None
    if isinstance(parts.mlp, MixtureParts):
        mlp, experts = parts.mlp.shared, parts.mlp.experts
        known |= {parts.mlp.router, parts.mlp.shared_gate}
        below = (f"{parts.mlp.router}.", f"{experts}.gate_up.", f"{experts}.down.")
        placed.add(f"{experts.removesuffix('.experts')}.{_CORRECTION}")
    else:
        mlp = parts.mlp
    if mlp is not None:
        known |= {*mlp.ups, mlp.down}
    for name, part in layer.named_modules():
        own = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        names = {f"{name}.{key}".lstrip(".") for key, _ in own}
        has_weights = isinstance(part, (QuantLinear, DenseLinear)) or not names <= placed
        if has_weights and name not in known and not name.startswith(below):
            raise UnsupportedStepError(f"weights in '{name}'")


def _check_bounds(attention: nn.Module) -> None:
    """Raise an error for bounds that random numbers do not reach."""
    config = getattr(attention, "config", None)
    for owner, name in ((config, "clip_qkv"), (attention, "_largest")):
        if getattr(owner, name, None) is not None:
            raise UnsupportedStepError("queries, keys and values with a bound")


_FEWEST_POSITIONS = 1024


class RotaryRows:
    """cos and sin of the rows of a step, from tables of all positions so far.

    Args:
        layers: of the stage.
        program: of the step.
        like: has dtype and device of the tables.
        is_short: whether the rotary embedding makes each angle once, not for both features.

    Attributes:
        buffers: of cos and sin of every layer of the model; empty without rotation.

    Raises:
        UnsupportedStepError: the angles depend on more than a token's position.
    """

    def __init__(
        self, layers: DecoderStage, program: StepProgram, like: Tensor, *, is_short: bool
    ) -> None:
        self._rotary: RotaryTables | None = layers.rotary
        self._is_short = is_short
        self._like = like
        self._tables: list[Tensor] = []
        self._length = 0
        self.buffers: list[tuple[Tensor, Tensor]] = []
        kinds: list[int] = []
        if layers.rotary is not None:
            if layers.rotary.depends_on_length and layers.rotary.switches_after is None:
                raise UnsupportedStepError("its rotary embedding depends on the length of a row")
            kinds = self._grow(layers.rotary, 1)
        elif (own := parts_of(layers.layers[0]).positions) is not None:
            sin, cos = own.to(like.dtype).chunk(2, dim=1)
            self._tables = [torch.cat((part, part), dim=1) for part in (cos, sin)]
            kinds = [0] * layers.config.num_hidden_layers
        self._places = [
            program.buffer(f"rotary {i}", table.shape[1], table.dtype)
            for i, table in enumerate(self._tables)
        ]
        self.buffers = [(self._places[2 * kind], self._places[2 * kind + 1]) for kind in kinds]

    def is_alone(self, batch: PackedBatch) -> bool:
        """Whether the angles of each token follow from its position."""
        switch = None if self._rotary is None else self._rotary.switches_after
        if switch is None:
            return True
        lengths = list(batch.rope_lengths or batch.lengths)
        return max(lengths) <= switch or (batch.is_decode and lengths == batch.lengths)

    def fill(self, positions: Tensor, longest: int) -> None:
        """Copy the rows at ``positions`` ``[R]`` into the buffers."""
        if self._rotary is not None and longest > self._length:
            self._grow(self._rotary, longest)
        for table, place in zip(self._tables, self._places, strict=True):
            torch.index_select(table, 0, positions, out=place[: len(positions)])

    def _grow(self, rotary: RotaryTables, longest: int) -> list[int]:
        """Compute the tables of at least ``longest`` positions; return each layer's kind."""
        length = max(_FEWEST_POSITIONS, 2 * self._length)
        length = max(length, longest)
        spans, switch = [(length, None)], rotary.switches_after
        if switch is not None and length > switch:
            spans = [(switch, None), (length - switch, None)]
        made = rotary(self._like, torch.arange(length)[None], spans)
        kinds: dict[int, int] = {}
        tables: list[Tensor] = []
        for table in made:
            if isinstance(table, Tensor):
                raise UnsupportedStepError("its rotary embedding has complex numbers")
            if id(table) not in kinds:
                kinds[id(table)] = len(kinds)
                tables += [self._by_halves(part[0]) for part in table]
        self._tables, self._length = tables, length
        return [kinds[id(table)] for table in made]

    def _by_halves(self, table: Tensor) -> Tensor:
        """Return a table ``[P, features]`` with the number of each pair once in either half."""
        if self._is_short:
            return torch.cat((table, table), dim=1)
        even, odd = table[:, ::2], table[:, 1::2]
        return torch.cat((even, odd), dim=1) if torch.equal(even, odd) else table.contiguous()
