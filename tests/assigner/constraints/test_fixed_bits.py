"""Bits of a given average have the least degradation."""

import itertools
import math

import numpy as np
import pytest

from llmpq.assigner.constraints.fixed_bits import bits_at_average
from llmpq.errors import InfeasibleError, SpecError

WIDTHS = (16, 8, 4, 3)


def average_of(bits, weights):
    """Return the mean bits of a weight, for layers of ``weights`` weights at ``bits``."""
    return sum(map(math.prod, zip(bits, weights, strict=True))) / sum(weights)


@pytest.mark.parametrize("seed", range(20))
def test_bits_at_an_average_equal_brute_force(seed):
    rng = np.random.default_rng(seed)
    weights = [int(size) for size in rng.choice([6, 10, 15], size=5)]
    omega = np.sort(rng.random((5, 4)), axis=1)
    omega[:, 0] = 0.0
    average = float(rng.uniform(3, 17))
    found = bits_at_average(omega, WIDTHS, weights, average)

    def loss(bits):
        return sum(omega[layer, WIDTHS.index(width)] for layer, width in enumerate(bits))

    every = itertools.product(WIDTHS, repeat=5)
    best = min(loss(bits) for bits in every if average_of(bits, weights) <= average + 1e-9)
    assert average_of(found, weights) <= average + 1e-9
    assert loss(found) == pytest.approx(best)


def test_an_average_that_is_no_binary_fraction_is_reached():
    omega = np.array([[0.0, 0.1, 0.5, 1.0]] * 10)
    assert average_of(bits_at_average(omega, WIDTHS, [7] * 10, 4.4), [7] * 10) == 4.4


@pytest.mark.parametrize("average", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_average_raises(average):
    with pytest.raises(SpecError, match="expected a number above 0"):
        bits_at_average(np.zeros((2, 4)), WIDTHS, [1, 1], average)


def test_too_few_bits_raise():
    with pytest.raises(InfeasibleError, match="expected at least 3"):
        bits_at_average(np.zeros((2, 4)), WIDTHS, [1, 1], 2.9)
