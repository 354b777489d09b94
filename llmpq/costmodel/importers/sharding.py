"""Tensor parallelism: what one of N devices holds of a decoder layer (Megatron; ExeGPT, Sec. 4.2).

Matrices that read the residual stream are cut by their outputs, those that write it by their
inputs, heads and keys and values evenly; norms are held whole. The two matrices that write leave
partial sums, which all devices add up: two all-reduces of the hidden states a layer.
"""

from __future__ import annotations

from dataclasses import replace

from llmpq.errors import SpecError
from llmpq.spec.model import LayerSpec, LinearSpec

ALL_REDUCES = 2
"""Of the hidden states, a layer: behind the attention's output and behind the feed-forward's."""

_WRITERS = frozenset({"o_proj", "out_proj", "down_proj", "fc2", "dense", "dense_4h_to_h"})
"""Names of the matrices that write the residual stream, in every family."""


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
