"""Operators: measured seconds of single kernels, and the decoder layer they add up to.

A layer is the sum of its calls (query, key and value products fused, gate and up fused) plus what
the databases leave out: norms, rotary and activation stream their values at ``stream_bytes_per_s``
and cost ``launch_s`` each. Experts are one measured call of their exact shape. With tensor
parallelism (Megatron; ExeGPT, Sec. 4.2) matrices that read the residual stream are cut by their
outputs, those that write it by their inputs, heads evenly, norms not at all; two all-reduces of the
hidden states add up the partial sums.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import log

from llmpq.errors import SpecError
from llmpq.spec.model import LayerSpec, LinearSpec
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample

SMALL_KERNELS = 4
"""Launches in addition to the products and attention: two norms, rotary, activation."""

_VALUE_BYTES = 2
ALL_REDUCES = 2
"""Of the hidden states, a layer: after the attention's output and after the feed-forward's."""

_WRITERS = frozenset({"o_proj", "out_proj", "down_proj", "fc2", "dense", "dense_4h_to_h"})
"""Names of the matrices that write the residual stream, in every family."""

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

HeadShape = tuple[int, int, int]
"""Query heads, key-value heads and head size of an attention call."""
TimesBySize = tuple[tuple[int, float], ...]
"""Ascending ``(size, seconds)`` of a kernel; linear between, in proportion above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTimes:
    """Measured products of one number format: ascending ``(rows, seconds)`` by ``(out, in)``."""

    points: Mapping[tuple[int, int], TimesBySize]
    _sizes: tuple[list[int], list[int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        outs, inners = ({shape[axis] for shape in self.points} for axis in (0, 1))
        object.__setattr__(self, "_sizes", (sorted(outs), sorted(inners)))

    @property
    def max_rows(self) -> int:
        """Rows up to which every weight shape was measured."""
        return min(rows[-1][0] for rows in self.points.values())

    def seconds(self, rows: int, out_features: int, in_features: int) -> float:
        """Return the seconds of ``[rows, in] x [in, out]``.

        Between measured sizes linear in each of the three; beyond the largest weight in proportion.
        """
        if (out_features, in_features) in self.points:
            return _along(self.points[out_features, in_features], rows)
        total = 0.0
        outs, inners = self._sizes
        for out, out_share in _bracket(outs, out_features):
            for inner, share in _bracket(inners, in_features):
                total += out_share * share * self._corner(rows, out, inner)
        return total

    def _corner(self, rows: int, out: int, inner: int) -> float:
        """Return a grid shape's seconds; a hole takes its nearest neighbour's, in proportion."""
        if (out, inner) in self.points:
            return _along(self.points[out, inner], rows)
        near = min(self.points, key=lambda one: abs(log(one[0] / out)) + abs(log(one[1] / inner)))
        return _along(self.points[near], rows) * (out * inner) / (near[0] * near[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTimes:
    """Measured attention calls of one phase: seconds by heads, then by ``(batch, tokens)``."""

    phase: Phase
    points: Mapping[HeadShape, Mapping[tuple[int, int], float]]

    def nearest(self, wanted: HeadShape) -> tuple[HeadShape, float]:
        """Return the measured head shape closest to ``wanted``, and the factor between them.

        Prefill attention is arithmetic and scales with the query heads; decode reads the cache and
        scales with the key-value heads. The factor is 1 where this exact shape was measured.
        """

        def distance(one: HeadShape) -> float:
            return sum(abs(log(mine / its)) for mine, its in zip(one, wanted, strict=True))

        near = min(self.points, key=lambda one: (distance(one), one))
        mine, its = (wanted[0], near[0]) if self.phase is Phase.PREFILL else (wanted[1], near[1])
        return near, mine * wanted[2] / (its * near[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTimes:
    """Measured seconds of the operators of one device.

    Attributes:
        gemms, experts: matrix products and routed feed-forwards by rows, by bits of the weights.
        stream_bytes_per_s: rate at which norms and activations move their values.
        launch_s: constant seconds of one small kernel.
        all_reduce: by values, between devices that share a layer; ``None`` where none do.
    """

    gemms: Mapping[int, GemmTimes]
    attention: Mapping[Phase, AttentionTimes]
    stream_bytes_per_s: float
    launch_s: float
    experts: Mapping[int, TimesBySize] = field(default_factory=dict)
    all_reduce: TimesBySize | None = None


def layer_samples(
    layer: LayerSpec, hidden_size: int, times: OperatorTimes
) -> tuple[LatencySample, ...]:
    """Return one sample for every shape at which both attention and the products were measured.

    ``layer`` may be one device's share of a layer. With experts, only bitwidths at which they were
    measured have samples.

    Raises:
        SpecError: the layer holds experts that were not measured at any bitwidth.
    """
    shape = expert_shape(layer)
    if shape is not None and not times.experts:
        raise SpecError(
            f"imported table: found no kernel of {shape.words}, expected this exact shape"
        )
    products = fused_products(layer)
    heads = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
    small_values = _small_values(layer, hidden_size)
    samples = []
    for bits, gemm in times.gemms.items():
        experts = times.experts.get(bits)
        if shape is not None and experts is None:
            continue
        most = min(gemm.max_rows, experts[-1][0]) if experts else gemm.max_rows
        multiplied: dict[int, float] = {}  # many contexts share their rows
        for phase, attention in times.attention.items():
            near, factor = attention.nearest(heads)
            for (batch, tokens), attention_s in sorted(attention.points[near].items()):
                rows = batch * tokens if phase is Phase.PREFILL else batch
                if rows > most:
                    continue
                if rows not in multiplied:
                    multiplied[rows] = sum(gemm.seconds(rows, *shape) for shape in products)
                seconds = factor * attention_s + multiplied[rows]
                seconds += _along(experts, rows) if experts else 0.0
                seconds += rows * small_values * _VALUE_BYTES / times.stream_bytes_per_s
                seconds += SMALL_KERNELS * times.launch_s
                if times.all_reduce is not None:
                    seconds += ALL_REDUCES * _along(times.all_reduce, rows * hidden_size)
                samples.append(
                    LatencySample(
                        phase=phase, bits=bits, batch=batch, tokens=tokens, seconds=seconds
                    )
                )
    return tuple(samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Sizes of a routed feed-forward."""

    hidden: int
    inner: int
    active: int
    count: int

    @property
    def words(self) -> str:
        """The shape, for messages."""
        return f"{self.count} experts of {self.hidden} x {self.inner}, {self.active} a token"


def expert_shape(layer: LayerSpec) -> ExpertShape | None:
    """Return the shape of a layer's experts, ``None`` for a dense layer."""
    down = next((op for op in reversed(layer.linears) if op.count > 1), None)
    if down is None:
        return None
    return ExpertShape(
        hidden=down.out_features, inner=down.in_features, active=down.active, count=down.count
    )


def shard_of(layer: LayerSpec, degree: int) -> LayerSpec:
    """Return what one of ``degree`` devices multiplies and attends to.

    Raises:
        SpecError: the layer has experts, or heads or widths that cannot be cut so.
    """
    if degree == 1:
        return layer
    if any(op.count > 1 for op in layer.linears):
        raise SpecError(f"tensor_parallel: found {degree} with experts, expected a dense layer")
    sizes = {
        "query heads": layer.num_heads,
        "key-value heads": layer.num_kv_heads,
        **{op.name: op.in_features if _writes(op) else op.out_features for op in layer.linears},
    }
    for name, size in sizes.items():
        if degree < 1 or size % degree:
            raise SpecError(
                f"tensor_parallel: found {degree}, expected a divisor of the layer's {size} "
                f"({name})"
            )
    return replace(
        layer,
        linears=tuple(_cut(op, degree) for op in layer.linears),
        num_heads=layer.num_heads // degree,
        num_kv_heads=layer.num_kv_heads // degree,
    )


def _writes(op: LinearSpec) -> bool:
    return op.name.rpartition(".")[2] in _WRITERS


def _cut(op: LinearSpec, degree: int) -> LinearSpec:
    if _writes(op):
        return replace(op, in_features=op.in_features // degree)
    return replace(op, out_features=op.out_features // degree)


def fused_products(layer: LayerSpec) -> tuple[tuple[int, int], ...]:
    """Return the dense weight shapes ``(out, in)`` of a layer as an engine multiplies them."""
    shapes: dict[str, tuple[int, int]] = {}
    for op in layer.linears:
        if op.count > 1:
            continue  # one routed call, see ``OperatorTimes.experts``
        leaf = op.name.rpartition(".")[2]
        key = next((group[0] for group in _FUSED if leaf in group), op.name)
        out = shapes.get(key, (0, op.in_features))[0]
        shapes[key] = (out + op.out_features, op.in_features)
    return tuple(shapes.values())


def _small_values(layer: LayerSpec, hidden_size: int) -> int:
    """Return the values one token's norms, rotary and activation read and write."""
    norms = 2 * 4 * hidden_size  # input and residual in, normed and residual out
    rotary = 2 * (layer.num_heads + layer.num_kv_heads) * layer.head_dim
    shape = expert_shape(layer)
    if shape is not None:
        return norms + rotary  # the routed call activates on its own
    inner = layer.linears[-1].in_features
    gated = any(op.name.endswith("gate_proj") for op in layer.linears)
    return norms + rotary + (3 if gated else 2) * inner


def _along(points: TimesBySize, rows: int) -> float:
    index = bisect_left(points, (rows, 0.0))
    if index < len(points) and points[index][0] == rows:
        return points[index][1]
    if index == 0:
        return points[0][1]
    if index == len(points):
        return points[-1][1] * rows / points[-1][0]
    (left, low), (right, high) = points[index - 1], points[index]
    return low + (high - low) * (rows - left) / (right - left)


def _bracket(sizes: list[int], wanted: int) -> list[tuple[int, float]]:
    """Return the measured sizes around ``wanted`` with their shares."""
    index = bisect_left(sizes, wanted)
    if index == len(sizes):
        return [(sizes[-1], wanted / sizes[-1])]
    if sizes[index] == wanted or index == 0:
        return [(sizes[index], 1.0)]
    left, right = sizes[index - 1], sizes[index]
    share = (wanted - left) / (right - left)
    return [(left, 1.0 - share), (right, share)]
