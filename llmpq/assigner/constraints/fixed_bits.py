"""Requests whose layers have fixed bits: the stored bits of a model, or those of an average.

Without devices and time the bits of an average are a knapsack, solved exactly. The average is over
the quantized weights, so 16-bit norms and embeddings do not count. Shape legend: L layers, B bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from llmpq.assigner.heuristics.additive import AdditiveProblem, least_cost
from llmpq.assigner.objective import FloatArray
from llmpq.assigner.request import PlanRequest, omega_of
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.model import ModelSpec


def with_stored_bits(request: PlanRequest, option: str = "bits") -> PlanRequest:
    """Return the request with the stored bits of layers, and of a head, that are quantized already.

    Args:
        request: of a model.
        option: what errors call the bits of the request.

    Raises:
        SpecError: the request does not allow these bits.
    """
    widths = [precision.bits for precision in request.model.stored]
    if not widths:
        return request
    bits = tuple(sorted(set(widths), reverse=True))
    if not set(bits) <= set(request.bits):
        raise SpecError(
            f"{option}: found {list(request.bits)}, expected {list(bits)} among them: layers of "
            f"{request.model_source} are stored at these bits and can be served at no others"
        )
    request = replace(_with_stored_head(request), bits=bits)
    return request if len(bits) == 1 else _with_bits(request, widths)


def _with_stored_head(request: PlanRequest) -> PlanRequest:
    stored, fixed = request.model.stored_head, request.overrides.head_bits
    if stored is None:
        return request
    if fixed not in (None, stored.bits):
        raise SpecError(
            f"--fix_bits head: found {fixed}, expected {stored.bits}, as the head of "
            f"{request.model_source} is stored"
        )
    return replace(request, head_bits=(stored.bits,))


def with_average_bits(request: PlanRequest, average: float) -> PlanRequest:
    """Return the request with the bits that lose least at a mean of ``average`` bits a weight.

    Raises:
        SpecError: the average is not a number above 0.
        InfeasibleError: it is below the fewest bits allowed.
    """
    weights = quantizable_weights(request.model)
    return _with_bits(request, bits_at_average(omega_of(request), request.bits, weights, average))


def quantizable_weights(model: ModelSpec) -> tuple[int, ...]:
    """Return ``[L]`` the number of quantizable weights of every layer."""
    return tuple(
        sum(op.weight_parameters for op in layer.linears if op.quantizable)
        for layer in model.layers
    )


def bits_at_average(
    omega: FloatArray, bits: Sequence[int], weights: Sequence[int], average: float
) -> tuple[int, ...]:
    """Return the bits of least degradation with at most ``average`` bits a weight.

    ``omega [L, B]`` has a column for each of ``bits``; ``weights [L]`` counts each layer's weights.

    Raises:
        SpecError: the average is not a number above 0.
        InfeasibleError: it is below the fewest bits allowed.
    """
    if not 0 < average < math.inf:
        raise SpecError(f"average bits: found {average}, expected a number above 0")
    unit = math.gcd(*weights)
    sizes = np.array([[size // unit * width for width in bits] for size in weights])  # [L, B]
    # A little slack: 4.1 is not a binary fraction, and ten layers of it are 41 bits.
    capacity = math.floor(sum(weights) // unit * average * (1 + 1e-12))
    problem = AdditiveProblem(
        costs=np.asarray(omega, dtype=np.float64)[None],
        sizes=sizes[None].astype(np.int64),
        capacities=np.array([capacity], dtype=np.int64),
    )
    found = least_cost(problem)
    if found is None:
        raise InfeasibleError(
            f"average bits: found {average:g}, expected at least {min(bits)}, the fewest that "
            "may be used"
        )
    return tuple(bits[width] for width in found.widths)


def _with_bits(request: PlanRequest, widths: Sequence[int]) -> PlanRequest:
    ranges: list[tuple[int, int, int]] = []
    for layer, width in enumerate(widths):
        if ranges and ranges[-1][2] == width:
            ranges[-1] = (ranges[-1][0], layer + 1, width)
        else:
            ranges.append((layer, layer + 1, width))
    return replace(request, overrides=replace(request.overrides, layer_bits=tuple(ranges)))
