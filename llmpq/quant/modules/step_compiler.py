"""Compile a decoder layer of transformers into the operators of a step.

What the modules of a layer do is in the record of its family: names of linear operators and norms,
the kind of router, and in the ``LayerForm`` how they are combined. All weights of a layer must
belong to a module that is known by it. That the record is right is not known here: the caller
compares both on random numbers (``llmpq.dist.engine.compiled_steps``). Norms and activations are
recognized by the values that they return.

``RotaryRows`` are cosines and sines of the tokens of a compiled step.

Shapes: R rows (tokens), C hidden size, E experts, k experts of a row, H heads, h KV heads, d
head_dim, P positions.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmpq.kernels.base import PreparedWeight
from llmpq.kernels.cpu.experts import RowRouter, append_apart, append_experts, append_route
from llmpq.kernels.cpu.paged_attention import PagedHeads
from llmpq.kernels.cpu.step import (
    FEW_ROWS,
    RowNorm,
    StepKernel,
    StepProgram,
    StepScores,
    UnsupportedStepError,
)
from llmpq.models import DecoderStage, PackedBatch
from llmpq.models.stage import RotaryTables
from llmpq.models.states import COMPILED
from llmpq.quant.modules.experts import (
    HostExperts,
    Linear,
    activation_like,
    row_experts,
    weight_of,
)
from llmpq.quant.modules.layer import (
    DenseLinear,
    FusedNorm,
    QuantExperts,
    QuantLinear,
)
from llmpq.quant.modules.mixers import CompiledMixer
from llmpq.spec.families import Family, LayerForm, family_of
from llmpq.spec.huggingface.feed_forward import Experts, Gated, Score

_CORRECTIONS = ("e_score_correction_bias", "expert_bias")
"""Names of the tensor of a router, or of the mixture, with a number for each expert."""
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
        activation: of the gate or the projection; ``None`` where it is no module.
        function: the activation then.
        down: after it.
    """

    ups: tuple[str, ...]
    has_gate: bool
    activation: str | None
    function: str | None
    down: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureParts:
    """Names of the modules of a mixture of experts.

    Attributes:
        router: chooses experts.
        score: of its logits.
        normalizes: whether the weights of a row are divided by their sum.
        experts: a ``QuantExperts``.
        shared: added to the experts' sum.
        shared_gate: whose sigmoid multiplies what ``shared`` makes.
        correction: a number for each expert, of the router.
    """

    router: str
    score: Score
    normalizes: bool
    experts: str
    shared: MlpParts | None
    shared_gate: str | None
    correction: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """Names of the modules of a layer by what they do.

    Attributes:
        form: how they are combined.
        norms: before and after attention, before and after the MLP.
        attention: the module of attention.
        projections: of queries, keys and values, of queries and keys, or a single one of all.
        output: after attention.
        head_norms: of queries, keys and values, as far as the family has them.
        mlp: the MLP, or the mixture in its place.
        multiplier: factor of what attention and MLP add to their input.
        scalar: factor of the output.
        sinks: one more score of each head, ``[H]``.
        is_gated: whether a query has a gate of its output beside it.
        mixer: what keeps a state in place of attention; ``None`` for attention.
    """

    form: LayerForm
    norms: tuple[str | None, str | None, str | None, str | None]
    attention: str
    projections: tuple[str, ...]
    output: str
    head_norms: tuple[str | None, ...]
    mlp: MlpParts | MixtureParts
    multiplier: float
    scalar: float
    sinks: Tensor | None
    is_gated: bool = False
    mixer: CompiledMixer | None = None


def parts_of(layer: nn.Module, family: Family, form: LayerForm, config: object) -> LayerParts:
    """Return the modules of a layer, by the names in the record of its family.

    Args:
        layer: of transformers, quantized or not.
        family: its record.
        form: of the layer.
        config: of transformers.

    Raises:
        UnsupportedStepError: a module is missing, or one with weights is not known.
    """
    mixer = _mixer_of(layer)
    if mixer is not None:
        return _with_mixer(layer, family, form, config, *mixer)
    names, start = family.attention, f"{family.attention.prefix}."
    projections = [f"{start}{name}" for name in names.projections]
    if len(projections) == 3 and not _is_module(layer, projections[2]):
        projections.pop()  # values are the keys
    norms = (f"{start}{name}" for name in names.norm_names)
    found = LayerParts(
        form=form,
        norms=form.norms,
        attention=names.prefix,
        projections=tuple(projections),
        output=f"{start}{names.names[-1]}",
        head_norms=tuple(name if _is_module(layer, name) else None for name in norms),
        mlp=_feed_forward_of(layer, family.feed_forward, config),
        multiplier=float(getattr(layer, "residual_multiplier", 1.0)),
        scalar=float(layer.get_buffer(_SCALAR)) if _SCALAR in layer._buffers else 1.0,
        sinks=_attention_of(layer, family)._parameters.get(_SINKS),
        is_gated=names.query_widths == 2,
    )
    _check_modules(layer, found)
    _check_weights(layer, found)
    _check_bounds(layer.get_submodule(names.prefix))
    return found


def _mixer_of(layer: nn.Module) -> tuple[str, nn.Module] | None:
    """Return name and module of what keeps a state in a layer, ``None`` where nothing does."""
    named = layer.named_modules()
    return next((found for found in named if hasattr(found[1], COMPILED)), None)


def _with_mixer(
    layer: nn.Module, family: Family, form: LayerForm, config: object, name: str, module: nn.Module
) -> LayerParts:
    compiled = getattr(module, COMPILED)
    if compiled is None or compiled.form.append is None:
        raise UnsupportedStepError(f"the state of {type(module).__name__}")
    found = LayerParts(
        form=form,
        norms=form.norms,
        attention=name,
        projections=tuple(f"{name}.{one}" for one in compiled.form.projections),
        output=f"{name}.out_proj",
        head_norms=(),
        mlp=_feed_forward_of(layer, family.feed_forward, config),
        multiplier=float(getattr(layer, "residual_multiplier", 1.0)),
        scalar=1.0,
        sinks=None,
        mixer=compiled,
    )
    _check_modules(layer, found)
    _check_weights(layer, found)
    return found


def _attention_of(layer: nn.Module, family: Family) -> nn.Module:
    name = family.attention.prefix
    if not _is_module(layer, name):
        raise UnsupportedStepError(f"no module '{name}'")
    return layer.get_submodule(name)


def _feed_forward_of(
    layer: nn.Module, block: Gated | Experts, config: object
) -> MlpParts | MixtureParts:
    if isinstance(block, Gated):
        return _mlp_of(block)
    experts = f"{block.prefix}.{block.names[0].rpartition('.')[0]}"
    if not _is_module(layer, experts):
        return _mlp_of(block.dense)
    if not isinstance(layer.get_submodule(experts), QuantExperts):
        raise UnsupportedStepError(f"{type(layer.get_submodule(experts)).__name__} in '{experts}'")
    shared = block.shared_block.prefix
    has_shared = (block.shared is not None or block.shared_apart) and _is_module(layer, shared)
    return MixtureParts(
        router=f"{block.prefix}.{block.router.partition('.')[0]}",
        score=block.kind.score,
        normalizes=block.kind.normalizes_in(config),
        experts=experts,
        shared=_mlp_of(block.shared_block) if has_shared else None,
        shared_gate=f"{shared}_gate" if has_shared and block.shared_gate else None,
        correction=_correction_of(layer.get_submodule(block.prefix)),
    )


def _mlp_of(block: Gated) -> MlpParts:
    start = f"{block.prefix}." if block.prefix else ""
    *ups, down = (f"{start}{name}" for name in block.names)
    return MlpParts(
        ups=tuple(ups),
        has_gate=block.joined,
        activation=f"{start}{block.activation}" if block.function is None else None,
        function=block.function,
        down=down,
    )


def _correction_of(mixture: nn.Module) -> Tensor | None:
    tensors = itertools.chain(mixture.named_parameters(), mixture.named_buffers())
    found = (tensor for name, tensor in tensors if name.split(".")[-1] in _CORRECTIONS)
    correction = next(found, None)
    return None if correction is None else correction.detach().float().flatten()


def _is_module(layer: nn.Module, name: str) -> bool:
    try:
        return isinstance(layer.get_submodule(name), nn.Module)
    except AttributeError:
        return False


def _check_modules(layer: nn.Module, parts: LayerParts) -> None:
    """Raise an error for a module of the record that the layer lacks."""
    mlp = parts.mlp.shared if isinstance(parts.mlp, MixtureParts) else parts.mlp
    names = [*parts.norms, *parts.projections, parts.output]
    if isinstance(parts.mlp, MixtureParts):
        names += [parts.mlp.router, parts.mlp.shared_gate]
    if mlp is not None:
        names += [*mlp.ups, mlp.activation, mlp.down]
    for name in names:
        if name is not None and not _is_module(layer, name):
            raise UnsupportedStepError(f"no module '{name}'")


def _check_weights(layer: nn.Module, parts: LayerParts) -> None:
    """Raise an error for weights that have no place in the step."""
    known = {*parts.norms, *parts.projections, parts.output, *parts.head_norms}
    below: tuple[str, ...] = ()  # prefixes of modules that are known as a whole
    if parts.mixer is not None:
        known.add(parts.attention)
        below = (f"{parts.attention}.",)
    placed = {_SCALAR, f"{parts.attention}.{_POSITIONS}", f"{parts.attention}.{_SINKS}"}
    mlp: MlpParts | None
    if isinstance(parts.mlp, MixtureParts):
        mlp, experts = parts.mlp.shared, parts.mlp.experts
        known |= {parts.mlp.router, parts.mlp.shared_gate}
        below += (f"{parts.mlp.router}.", f"{experts}.gate_up.", f"{experts}.down.")
        placed |= {f"{experts.removesuffix('.experts')}.{name}" for name in _CORRECTIONS}
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


def stored_positions(layers: DecoderStage) -> Tensor | None:
    """Return sines and cosines that layers have of their own, ``[P, rotated features]``."""
    family = family_of(layers.config.model_type)
    if _mixer_of(layers.layers[0]) is not None:
        return None
    return _attention_of(layers.layers[0], family)._buffers.get(_POSITIONS)


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
        elif (own := stored_positions(layers)) is not None:
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


_EPSILONS = ("variance_epsilon", "eps", "norm_eps")
_USUAL_EPSILON = 1e-5
_SIZES = (1.0, 0.003, 30.0)
"""Sizes of the rows that norms are tried on: small ones show epsilon."""
_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 0.01, torch.float16: 0.00125}
"""Largest difference of a norm's output, relative to its size."""


def norm_like(module: nn.Module, columns: int, dtype: torch.dtype) -> RowNorm:
    """Return the norm that computes what ``module`` does.

    Args:
        module: of rows ``[..., C]``, or of heads ``[..., H, C]`` if its weight has two dimensions.
        columns: C.
        dtype: of the rows.

    Raises:
        UnsupportedStepError: there is none.
    """
    weight = getattr(module, "weight", None)
    bias = getattr(module, "bias", None)
    factor = None if weight is None else weight.detach().float()
    offset = None if bias is None else bias.detach().float()
    if factor is not None and factor.shape[-1] != columns:
        raise UnsupportedStepError(f"a norm of {factor.shape[-1]} of {columns} numbers")
    epsilon = next(
        (float(getattr(module, name)) for name in _EPSILONS if hasattr(module, name)),
        _USUAL_EPSILON,
    )
    if isinstance(module, FusedNorm):
        return RowNorm(weight=factor, bias=None, epsilon=epsilon, centers=False, rounds=True)
    if type(module) is nn.LayerNorm:
        return RowNorm(weight=factor, bias=offset, epsilon=epsilon, centers=True, rounds=False)
    heads = 1 if factor is None or factor.dim() == 1 else len(factor)
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor(_SIZES)[:, None, None]
    rows = (torch.randn(len(_SIZES), heads, columns, generator=generator) + 0.5) * sizes
    rows = rows.to(None if factor is None else factor.device, dtype)
    expected = module(rows[None])[0].float()
    factors = [None] if factor is None else [factor, 1 + factor, (1 + factor).to(dtype).float()]
    best, least = None, _LIMITS[dtype]
    for centers, rounds, own in itertools.product((False, True), (False, True), factors):
        norm = RowNorm(weight=own, bias=offset, epsilon=epsilon, centers=centers, rounds=rounds)
        difference = (_normed(rows, norm) - expected).norm() / expected.norm()
        if difference < least:
            best, least = norm, float(difference)
    if best is None:
        raise UnsupportedStepError(f"the norm {type(module).__name__}")
    return best


def _normed(rows: Tensor, norm: RowNorm) -> Tensor:
    """Return what ``norm`` makes of rows ``[..., C]``, as float32 numbers of their dtype."""
    x = rows.float()
    if norm.centers:
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.epsilon)
    if norm.rounds:
        x = x.to(rows.dtype).float()
    if norm.weight is not None:
        x = x * norm.weight
    if norm.bias is not None:
        x = x + norm.bias
    return x.to(rows.dtype).float()


_ROWS = 64
"""Random rows on which routers are tried."""
_ALIKE = 0.9
"""Least share of rows with the same weights: two logits may be equal after rounding."""
_ROUTER_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.0025}
"""Largest difference of logits and of the weights of a row, relative to them (norms)."""
_FACTOR = "routed_scaling_factor"
_JITTER = "router_jitter_noise"


def router_of(
    module: nn.Module,
    hidden_size: int,
    dtype: torch.dtype,
    parts: MixtureParts,
) -> RowRouter:
    """Return the router of a layer, once it has chosen what ``module`` does.

    Args:
        module: see :func:`routed`.
        hidden_size: C.
        dtype: of the rows.
        parts: the mixture, with the kind of router and the correction of its scores.

    Raises:
        UnsupportedStepError: the module computes something else.
    """
    unknown = UnsupportedStepError(f"the router {type(module).__name__}")
    matrices = [p.detach() for p in module.parameters() if p.shape[1:] == (hidden_size,)]
    if len(matrices) != 1:
        raise unknown
    weight, generator = matrices[0], torch.Generator().manual_seed(0)
    bias = next((p.detach() for name, p in module.named_parameters() if name == "bias"), None)
    rows = torch.randn(_ROWS, hidden_size, generator=generator).to(dtype)
    correction = parts.correction
    logits, weights, chosen = routed(module, rows, correction)
    router = RowRouter(
        weight=weight,
        bias=bias,
        correction=correction,
        count=weights.shape[1],
        score=parts.score,
        normalizes=parts.normalizes,
        factor=float(getattr(module, _FACTOR, 1.0)),
        jitter=float(getattr(module, _JITTER, 0.0)),
        rounds_logits=torch.equal(logits.float(), logits.to(dtype).float()),
        rounds_weights=weights.dtype == dtype,
    )
    logits = logits.float()
    own = functional.linear(rows.float(), weight.float(), None if bias is None else bias.float())
    if (logits - own).norm() > _ROUTER_LIMITS[dtype] * own.norm():
        raise unknown
    expected = _spread(logits, weights, chosen)
    difference = (_spread(logits, *router.choose(logits)) - expected).norm(dim=1)
    if (difference <= _ROUTER_LIMITS[dtype] * expected.norm(dim=1)).float().mean() < _ALIKE:
        raise unknown
    return router


def routed(
    module: nn.Module, rows: Tensor, correction: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits ``[R, E]``, weights and experts ``[R, k]`` of ``rows`` ``[R, C]``.

    Args:
        module: returns them in any order; gets the correction as another argument if it takes one.
        rows: of the layer.
        correction: ``[E]`` of its scores.

    Raises:
        UnsupportedStepError: it returns something else.
    """
    takes_correction = len(inspect.signature(module.forward).parameters) > 1
    found = module(rows, correction) if takes_correction else module(rows)
    if isinstance(found, tuple) and len(found) == 3:
        numbers = sorted((t for t in found if t.is_floating_point()), key=lambda t: t.shape[-1])
        chosen = [t for t in found if not t.is_floating_point()]
        if len(chosen) == 1 and numbers[0].shape == chosen[0].shape != numbers[1].shape:
            return numbers[1], numbers[0], chosen[0]
    raise UnsupportedStepError(f"the router {type(module).__name__}")


def _spread(logits: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Return the weights of all experts, ``[R, E]``."""
    return torch.zeros_like(logits).scatter(1, chosen, weights.float())


_SMALL_ROWS = 64
"""Outputs up to which a plain weight of any format takes no time: a number for each head."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerStep:
    """What a layer's step needs beside its modules.

    Attributes:
        hidden: buffer of the hidden states ``[R, C]``, changed in place.
        rotary: buffers of cos and sin ``[R, rotated features]``; ``None`` without rotation.
        heads: the layer's keys and values.
        scores: of its attention.
        parts: the modules of the layer.
        states: of its mixer in all slots, by kind; empty without.
    """

    hidden: Tensor
    rotary: tuple[Tensor, Tensor] | None
    heads: PagedHeads | None
    scores: StepScores
    parts: LayerParts
    states: dict[str, Tensor]


def append_layer(program: StepProgram, layer: nn.Module, step: LayerStep) -> None:
    """Append the operators of ``layer``.

    Raises:
        UnsupportedStepError: the layer has other weights, or kernels that have no compiled step.
    """
    _Layer(program, layer, step).append()


class _Layer:
    """A layer whose operators are appended to a program."""

    def __init__(self, program: StepProgram, layer: nn.Module, step: LayerStep) -> None:
        self._program = program
        self._layer = layer
        self._step = step
        self._parts = step.parts
        self._form = step.parts.form

    def append(self) -> None:
        """Append attention, MLP and what adds them to the hidden states."""
        program, parts, hidden = self._program, self._parts, self._step.hidden
        before, after, second, last = parts.norms
        normed = self._normed(before, hidden)
        mixes = parts.mixer is not None
        attended = self._mixed(normed) if mixes else self._attention(normed)
        self._norm_in_place(after, attended)
        if self._form.is_parallel:
            made = self._mlp(normed if second is None else self._normed(second, hidden))
            program.add(made, attended)
        else:
            program.add(hidden, attended, parts.multiplier)
            made = self._mlp(self._normed(second, hidden))
            self._norm_in_place(last, made)
        program.add(hidden, made, parts.multiplier)
        if parts.scalar != 1:
            program.scale(hidden, parts.scalar)

    def _mixed(self, x: Tensor) -> Tensor:
        """Append the mixer on ``x``; return the buffer of its output ``[R, C]``."""
        mixer, names = self._parts.mixer, self._parts.projections
        assert mixer is not None
        assert mixer.form.append is not None
        made = self._products(names, x, [f"mixer {place}" for place in range(len(names))])
        mixed = mixer.form.append(self._program, made, self._step.states)
        return self._product(self._parts.output, mixed, "attention")

    def _attention(self, x: Tensor) -> Tensor:
        """Append attention on ``x``; return the buffer of its output ``[R, C]``."""
        program, step = self._program, self._step
        assert step.heads is not None
        query, key, value = self._projected(x)
        gate = None
        if self._parts.is_gated:
            query, gate = query[:, ::2], query[:, 1::2]
        if len(self._parts.head_norms) > 2 and self._parts.head_norms[2] is not None:
            # Elsewhere, as the values may be the keys.
            place = program.buffer("value", value.shape[1] * value.shape[2])
            value = self._head_normed(2, value, place.view(value.shape))
        rotated = [query, key]
        for rotates in (True, False) if self._form.norms_late else (False, True):
            for index, part in enumerate(rotated):
                if not rotates:
                    self._head_normed(index, part, part)
                elif self._form.rotation is not None:
                    assert step.rotary is not None
                    program.rotate(part, *step.rotary, pairs=self._form.rotation == "pairs")
        attended = program.buffer("attended", query.shape[1] * query.shape[2])
        sinks = self._parts.sinks if step.scores.has_sinks else None
        program.attend((query, key, value), attended, step.heads, step.scores, sinks)
        if gate is not None:
            heads = attended.view(len(attended), *gate.shape[1:])
            for head in range(gate.shape[1]):
                program.gate(gate[:, head], heads[:, head], heads[:, head], "sigmoid")
        return self._product(self._parts.output, attended, "attention")

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Append the projections; return query ``[R, H, d]``, key and value ``[R, h, d]``."""
        assert self._step.heads is not None
        names, kv_heads = self._parts.projections, self._step.heads.keys.shape[1]
        dim = self._step.heads.dim
        found = self._products(names, x, "qkv"[: len(names)] if len(names) > 1 else ("fused",))
        heads = self._linear(self._parts.output).in_features // dim
        if len(found) > 1:
            query, key = _heads_of(found[0], dim), _heads_of(found[1], dim)
            return query, key, _heads_of(found[-1], dim)
        if found[0].shape[1] != (heads + 2 * kv_heads) * dim:
            raise UnsupportedStepError(f"{found[0].shape[1]} features in '{names[0]}'")
        if not self._form.by_heads:
            parts = _heads_of(found[0], dim)
            return parts[:, :heads], parts[:, heads:-kv_heads], parts[:, -kv_heads:]
        groups = found[0].view(len(found[0]), kv_heads, -1, dim)  # queries, a key and a value
        if kv_heads > 1 and heads > kv_heads:
            raise UnsupportedStepError("keys between the queries of different groups")
        query = groups[:, 0, :-2] if kv_heads == 1 else groups[:, :, 0]
        return query, groups[:, :, -2], groups[:, :, -1]

    def _mlp(self, x: Tensor) -> Tensor:
        """Append the MLP or the mixture on ``x``; return the buffer of its output ``[R, C]``."""
        mlp = self._parts.mlp
        return self._dense(mlp, x, "mlp") if isinstance(mlp, MlpParts) else self._mixture(mlp, x)

    def _dense(self, parts: MlpParts, x: Tensor, made: str) -> Tensor:
        program = self._program
        found = self._products(parts.ups, x, ("gate", "up")[: len(parts.ups)])
        gate, up, y = found[0], None, found[0]
        if len(found) > 1:
            up = found[1]
        elif parts.has_gate:
            gate, up = gate.chunk(2, dim=1)
            y = program.buffer("gated", gate.shape[1])
        activation = parts.function
        if activation is None:
            assert parts.activation is not None
            activation = activation_like(self._layer.get_submodule(parts.activation))
        program.gate(gate, up, y, activation)
        return self._product(parts.down, y, made)

    def _mixture(self, parts: MixtureParts, x: Tensor) -> Tensor:
        program, layer = self._program, self._layer
        module = layer.get_submodule(parts.experts)
        assert isinstance(module, QuantExperts)
        router = router_of(layer.get_submodule(parts.router), x.shape[1], program.dtype, parts)
        route = append_route(program, x, router)
        apart = None
        if isinstance(module, HostExperts):
            host = module.host_layer(program.dtype, x.shape[1], router.count)
            apart = append_apart(program, x, program.buffer("apart", x.shape[1]), route, host)
        shared = None if parts.shared is None else self._dense(parts.shared, x, "shared")
        shared_gate = None
        if parts.shared_gate is not None:
            linear = self._linear(parts.shared_gate)
            shared_gate = program.buffer("shared gate", 1)
            weight = weight_of(parts.shared_gate, linear)
            program.products(x, [(shared_gate, weight, linear.bias)])
        experts = row_experts(module, module.on_device)
        experts = replace(experts, shared=shared, shared_gate=shared_gate, apart=apart)
        y = program.buffer("mlp", x.shape[1])
        append_experts(program, x, y, route, experts)
        return y

    def _normed(self, name: str | None, x: Tensor) -> Tensor:
        """Append a norm of ``x`` ``[R, C]``; return its buffer."""
        if name is None:
            return x
        y = self._program.buffer("normed", x.shape[1])
        self._norm(name, x[:, None], y[:, None])
        return y

    def _norm_in_place(self, name: str | None, x: Tensor) -> None:
        if name is not None:
            self._norm(name, x[:, None], x[:, None])

    def _head_normed(self, index: int, x: Tensor, y: Tensor) -> Tensor:
        """Append the norm of queries, keys or values ``[R, H, d]``, if any; return ``y``."""
        name = self._parts.head_norms[index]
        if name is None:
            return y
        weight = getattr(self._layer.get_submodule(name), "weight", None)
        if weight is not None and weight.dim() == 1 and weight.numel() == x.shape[1] * x.shape[2]:
            self._norm(name, x.flatten(1)[:, None], y.flatten(1)[:, None])
        else:
            self._norm(name, x, y)
        return y

    def _norm(self, name: str, x: Tensor, y: Tensor) -> None:
        norm = norm_like(self._layer.get_submodule(name), x.shape[2], self._program.dtype)
        self._program.norm(x, y, norm)

    def _product(self, name: str, x: Tensor, made: str) -> Tensor:
        return self._products((name,), x, (made,))[0]

    def _products(self, names: Sequence[str], x: Tensor, made: Sequence[str]) -> list[Tensor]:
        """Append products of ``x`` by linear operators; return the buffers of the results."""
        outputs: list[Tensor] = []
        parts: dict[StepKernel, list[tuple[Tensor, PreparedWeight | Tensor, Tensor | None]]] = {}
        for name, buffer in zip(names, made, strict=True):
            linear = self._linear(name)
            weight = weight_of(name, linear)
            if isinstance(weight, Tensor) and len(weight) > _SMALL_ROWS:
                if weight.dtype != torch.float32:
                    raise UnsupportedStepError(f"a plain weight of {weight.dtype}")
                self._program.limit(FEW_ROWS)
            y = self._program.buffer(buffer, linear.out_features)
            outputs.append(y)
            kernel = self._program.kernel_of(weight)
            parts.setdefault(kernel, []).append((y, weight, linear.bias))
        for own in parts.values():
            self._program.products(x, own)
        return outputs

    def _linear(self, name: str) -> Linear:
        linear = self._layer.get_submodule(name)
        if not isinstance(linear, (QuantLinear, DenseLinear, nn.Linear)):
            raise UnsupportedStepError(f"{type(linear).__name__} in '{name}'")
        return linear


def _heads_of(x: Tensor, dim: int) -> Tensor:
    if x.shape[1] % dim:
        raise UnsupportedStepError(f"{x.shape[1]} features in heads of {dim}")
    return x.view(len(x), -1, dim)
