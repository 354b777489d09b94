"""The operators of a layer behind its attention: dense, gated, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from llmpq.spec.huggingface.config import (
    EXPERTS,
    EXPERTS_PER_TOKEN,
    HIDDEN,
    SHARED_EXPERTS,
    Config,
)
from llmpq.spec.model import LinearSpec

DENSE, SPARSE = "dense", "sparse"
FeedForwards = Callable[[Config], Sequence["FeedForward"]]
"""Reads the feed-forward of every layer."""
Score = Literal["softmax", "sigmoid", "sparse mixer"]
"""What a router makes of the logit of an expert."""
Bias = bool | str
"""Whether an operator has a bias, or the field that says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """Operators and other parameters of one feed-forward."""

    linears: tuple[LinearSpec, ...]
    others: int = 0


def has_bias(fields: Config, bias: Bias) -> bool:
    """Return whether there is a bias; an absent field means none."""
    return fields.flag_or(bias, default=False) if isinstance(bias, str) else bias


def linear(name: str, out_features: int, in_features: int, bias: bool = False) -> LinearSpec:
    """Return a linear operator."""
    return LinearSpec(name=name, out_features=out_features, in_features=in_features, bias=bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gated:
    """Gate, up and down; the same in every layer.

    Attributes:
        prefix: path of the block.
        names: of gate, up and down; two names if gate and up are one matrix, or there is no gate.
        activation: name of the activation's module.
        function: the activation where it is no module but a function.
        joined: gate and up are one matrix.
        bias: of all operators.
        widths: fields of the inner size; four times the hidden size if none is set.
        norm: whether the inner values are normed (BitNet).
        others: further parameters (the activation of Apertus).
    """

    prefix: str = "mlp"
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    activation: str = "act_fn"
    function: str | None = None
    joined: bool = False
    bias: Bias = False
    widths: tuple[str, ...] = ("intermediate_size",)
    norm: bool = False
    others: int = 0

    def __call__(self, fields: Config) -> Sequence[FeedForward]:
        """Return the feed-forward of every layer."""
        return [self.of_width(fields, fields.size(*self.widths))] * fields.layers()

    def of_width(self, fields: Config, width: int) -> FeedForward:
        """Return the feed-forward of an inner size."""
        hidden, bias = fields.size(*HIDDEN), has_bias(fields, self.bias)
        start = f"{self.prefix}." if self.prefix else ""
        *ups, down = self.names
        outputs = 2 * width if self.joined else width
        return FeedForward(
            linears=(
                *(linear(f"{start}{name}", outputs, hidden, bias) for name in ups),
                linear(f"{start}{down}", hidden, width, bias),
            ),
            others=self.others + (width if self.norm else 0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain(Gated):
    """Up and down without a gate."""

    names: tuple[str, ...] = ("up_proj", "down_proj")

    def __call__(self, fields: Config) -> Sequence[FeedForward]:
        """Return the feed-forward of every layer."""
        width = fields.size(*self.widths, default=4 * fields.size(*HIDDEN))
        return [self.of_width(fields, width)] * fields.layers()


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterKind:
    """How a router weighs the experts of a token.

    Attributes:
        score: of a logit: its share in a softmax of all, its sigmoid, or its share in a softmax of
            those near it that were not chosen before (``sparsemixer`` of Phi-3.5-MoE).
        normalizes: whether the weights of a token are divided by their sum, or the field that says
            so.
    """

    score: Score = "softmax"
    normalizes: bool | str = True

    def normalizes_in(self, config: object) -> bool:
        """Return whether the weights are divided by their sum in a model.

        Args:
            config: of transformers.
        """
        if isinstance(self.normalizes, str):
            return bool(getattr(config, self.normalizes, False))
        return self.normalizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A router, experts of a gated feed-forward, and maybe an expert that all tokens visit.

    Attributes:
        prefix: path of the block.
        router: path of the router in the block.
        router_bias: whether it has one.
        kind: of the router.
        widths: fields of an expert's inner size.
        names: of the two stacked matrices.
        bias: of the experts.
        shared: path of the shared expert, which has a bias where ``dense`` has one; ``None`` for
            none.
        shared_width: its inner size; by default the shared experts side by side.
        shared_joined: names of its two operators if gate and up are one matrix.
        shared_gate: whether a scalar gate weighs it (Qwen2-MoE).
        shared_apart: whether it is the feed-forward ``dense`` beside the block (Granite 4).
        correction: parameters of each expert that the router keeps beside its matrix.
        layers: which layers are mixtures; by default all.
        dense: the feed-forward of the others.
    """

    prefix: str = "mlp"
    router: str = "gate"
    router_bias: bool = False
    kind: RouterKind = RouterKind()
    widths: tuple[str, ...] = ("moe_intermediate_size",)
    names: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    bias: bool = False
    shared: str | None = None
    shared_width: Callable[[Config], int] | None = None
    shared_joined: tuple[str, ...] | None = None
    shared_gate: bool = False
    shared_apart: bool = False
    correction: int = 0
    layers: Callable[[Config], Sequence[bool]] | None = None
    dense: Gated = Gated()

    def __call__(self, fields: Config) -> Sequence[FeedForward]:
        """Return the feed-forward of every layer."""
        count = fields.layers()
        sparse = [True] * count if self.layers is None else self.layers(fields)
        mixture = self.mixture(fields) if any(sparse) else None
        dense = None if all(sparse) else self.dense(fields)[0]
        found = [mixture if is_sparse else dense for is_sparse in sparse]
        return [one for one in found if one is not None]

    def mixture(self, fields: Config) -> FeedForward:
        """Return the block of experts."""
        hidden, width = fields.size(*HIDDEN), fields.size(*self.widths)
        count, active = fields.size(*EXPERTS), fields.size(*EXPERTS_PER_TOKEN)
        if active > count:
            raise fields.error("num_experts_per_tok", active, f"at most {count} experts")
        start = f"{self.prefix}."
        gate_up, down = (
            replace(
                linear(f"{start}{name}", *shape, self.bias),
                count=count,
                active=active,
            )
            for name, shape in zip(self.names, ((2 * width, hidden), (hidden, width)), strict=True)
        )
        router = linear(f"{start}{self.router}", count, hidden, self.router_bias)
        shared = self._shared(fields, width)
        return FeedForward(
            linears=(replace(router, quantizable=False), *shared, gate_up, down),
            others=self.correction * count,
        )

    @property
    def shared_block(self) -> Gated:
        """The shared expert."""
        if self.shared_apart:
            return self.dense
        prefix = f"{self.prefix}.{self.shared}"
        if self.shared_joined is None:
            return Gated(prefix=prefix, bias=self.dense.bias)
        return Gated(prefix=prefix, names=self.shared_joined, joined=True)

    def _shared(self, fields: Config, width: int) -> tuple[LinearSpec, ...]:
        if self.shared is None:
            return ()
        if self.shared_width is None:
            wide = width * fields.size(*SHARED_EXPERTS, default=0, minimum=0)
        else:
            wide = self.shared_width(fields)
        if wide == 0:
            return ()
        found = self.shared_block.of_width(fields, wide).linears
        if not self.shared_gate:
            return found
        gate = linear(f"{self.prefix}.{self.shared}_gate", 1, fields.size(*HIDDEN))
        return (*found, replace(gate, quantizable=False))


def after_first(field: str | None = None, default: int = 0) -> Callable[[Config], Sequence[bool]]:
    """Return a rule: dense layers first, as many as ``field`` says; ``mlp_layer_types`` overrides.

    Args:
        field: number of dense layers; ``None`` if there is no such field.
        default: their number without it.
    """

    def layers(fields: Config) -> Sequence[bool]:
        count = fields.layers()
        kinds = fields.words("mlp_layer_types", count, (DENSE, SPARSE))
        if kinds is not None:
            return [kind == SPARSE for kind in kinds]
        first = default if field is None else fields.size(field, default=default, minimum=0)
        return [index >= first for index in range(count)]

    return layers


def by_step(fields: Config) -> Sequence[bool]:
    """Return the mixtures of Qwen: every ``decoder_sparse_step``-th layer, some left out."""
    step = fields.size("decoder_sparse_step")
    dense = fields.indices("mlp_only_layers")
    return [index not in dense and (index + 1) % step == 0 for index in range(fields.layers())]


def by_interval(fields: Config) -> Sequence[bool]:
    """Return the mixtures of ERNIE: a range of layers, every ``moe_layer_interval``-th."""
    count = fields.layers()
    first = fields.size("moe_layer_start_index", minimum=0)
    last = fields.integer("moe_layer_end_index", -1)
    every = fields.size("moe_layer_interval")
    end = count if last == -1 else last + 1
    return [first <= index < end and (index + 1) % every == 0 for index in range(count)]


def by_period(fields: Config) -> Sequence[bool]:
    """Return the mixtures of Jamba: one in ``expert_layer_period`` layers, if there are several."""
    chosen = fields.periodic("expert_layer_period", "expert_layer_offset")
    return [one and fields.size(*EXPERTS) > 1 for one in chosen]


def by_list(fields: Config) -> Sequence[bool]:
    """Return the mixtures of Llama 4: ``moe_layers``, else every n-th layer."""
    count = fields.layers()
    if fields.has("moe_layers"):
        chosen = fields.indices("moe_layers")
        return [index in chosen for index in range(count)]
    every = fields.size("interleave_moe_layer_step")
    return [(index + 1) % every == 0 for index in range(count)]
