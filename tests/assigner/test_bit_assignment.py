from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from helpers.builders import random_problem

from llmpq.assigner.objective import assign_bits_within_stage, assignment_of_counts
from llmpq.errors import SolverError


def test_bits_within_a_stage_are_the_cheapest_of_all_arrangements() -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        widths = int(rng.integers(2, 5))
        layers = int(rng.integers(1, 7))
        omega = rng.random((layers, widths))
        counts = np.bincount(rng.integers(0, widths, size=layers), minlength=widths).tolist()
        start = [width for width, count in enumerate(counts) for _ in range(count)]
        best = min(
            sum(omega[layer, width] for layer, width in enumerate(choice))
            for choice in set(permutations(start))
        )
        chosen = assign_bits_within_stage(omega, counts)
        assert sorted(chosen) == start
        assert sum(omega[i, w] for i, w in enumerate(chosen)) == pytest.approx(best, rel=1e-12)


def test_assignment_of_counts_raises_for_counts_of_other_kinds() -> None:
    problem = random_problem(3, kinds=np.array([0, 0]), order=(0,), omega=np.zeros((2, 3)))
    table = np.zeros((problem.costs.kv_bytes.size, 3))
    table[0, 0] = 1
    with pytest.raises(SolverError, match="placed 1 of 2"):
        assignment_of_counts(problem, [table])
