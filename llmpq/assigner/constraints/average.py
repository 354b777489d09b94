"""Bits of every layer for a given average: least degradation under a budget of bits.

Without devices and time the plan's program is a knapsack, solved exactly. The average is over the
quantized weights, so a layer of twice the size counts twice, and 16-bit norms and embeddings do not
count.

Shape legend: L layers, B bitwidths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from llmpq.assigner.heuristics.additive import AdditiveProblem, least_cost
from llmpq.assigner.problem import FloatArray
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.model import ModelSpec


def quantizable_weights(model: ModelSpec) -> tuple[int, ...]:
    """Return ``[L]`` the number of quantizable weights of every layer."""
    return tuple(
        sum(op.weight_parameters for op in layer.linears if op.quantizable)
        for layer in model.layers
    )


def average_of(bits: Sequence[int], weights: Sequence[int]) -> float:
    """Return the mean bits of a weight, for layers of ``weights`` weights at ``bits``."""
    return sum(map(math.prod, zip(bits, weights, strict=True))) / sum(weights)


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
