"""Evaluations calculated by hand."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.builders import pair_costs

from llmpq.assigner.objective import Assignment, AssignmentProblem, evaluate, is_feasible


def two_stages(formula: str, **overrides) -> AssignmentProblem:
    costs = pair_costs(
        prefill_s=[[[2.0, 3.0]], [[4.0, 5.0]]],
        decode_s=[[[0.2, 0.1]], [[0.4, 0.3]]],
        layer_bytes=[[[10, 5]], [[10, 5]]],
        kv_bytes=2,
        capacity_bytes=[30, 20],
        master_bytes=[8, 8],
        master_prefill_s=[1.0, 1.5],
        master_decode_s=[0.05, 0.06],
        send_s=(0.5, 0.02),
        return_s=(0.25, 0.01),
        prefill_batches=3,
        decode_batches=2,
        new_tokens=11,
    )
    values = {
        "costs": costs,
        "kinds": np.zeros(3, dtype=np.int64),
        "bits": (16, 4),
        "omega": np.array([[0.0, 0.2], [0.0, 0.3], [0.0, 0.5]]),
        "theta_s": 10.0,
        "quality_budget": None,
        "formula": formula,
        "order": (0, 1),
    }
    return AssignmentProblem(**(values | overrides))


SPLIT = Assignment((0, 0, 1), (0, 1, 0))
# Stage 0: prefill 2 + 3 + 1 = 6, decode 0.2 + 0.1 + 0.05 = 0.35. Stage 1: 4 and 0.4.


def test_steady_formula_by_hand() -> None:
    found = evaluate(two_stages("steady"), SPLIT)
    one_pass = 0.35 + 0.02 + 0.4 + 0.01
    expected = 2 * 6 + (6 + 0.5 + 4 + 0.25) + 10 * max(2 * 0.4, one_pass)
    assert found.latency_s == pytest.approx(expected)
    assert found.quality == pytest.approx(0.3)
    assert found.objective_s == pytest.approx(expected + 3.0)


def test_steady_round_is_one_pass_when_too_few_micro_batches_fill_the_pipeline() -> None:
    problem = two_stages("steady")
    slow_link = pair_costs(
        prefill_s=problem.costs.prefill_s,
        decode_s=problem.costs.decode_s,
        layer_bytes=problem.costs.layer_bytes,
        capacity_bytes=100,
        send_s=(0.0, 0.3),
        decode_batches=1,
        new_tokens=11,
    )
    found = evaluate(two_stages("steady", costs=slow_link), SPLIT)
    assert found.latency_s == pytest.approx(5 + 4 + 10 * (0.3 + 0.3 + 0.4))


def test_paper_formula_by_hand() -> None:
    found = evaluate(two_stages("paper"), SPLIT)
    assert found.latency_s == pytest.approx(2 * 6 + (6 + 4) + 10 * (1 * 0.4) + (0.35 + 0.4))


def test_a_slow_link_is_the_slowest_stage() -> None:
    problem = two_stages("paper")
    problem.costs.send_prefill_s[0, 1] = 9.0
    assert evaluate(problem, SPLIT).latency_s == pytest.approx(2 * 9 + 10 + 4 + 0.75)


def test_one_stage_sends_nothing() -> None:
    found = evaluate(two_stages("steady"), Assignment((0, 0, 0), (0, 0, 0)))
    assert found.latency_s == pytest.approx(2 * 7 + 7 + 10 * (2 * 0.65))
    assert [stage.send_decode_s for stage in found.stages] == [0.0]


def test_the_master_runs_without_layers() -> None:
    found = evaluate(two_stages("steady"), Assignment((1, 1, 1), (1, 1, 1)))
    assert [stage.prefill_s for stage in found.stages] == [1.0, 15.0]
    assert found.stages[0].send_prefill_s == 0.5


def test_memory_counts_the_master_on_the_first_device_only() -> None:
    problem = two_stages("steady")  # the master leaves 30 - 8 bytes
    assert evaluate(problem, Assignment((0, 0, 1), (0, 0, 0))).excess_bytes == 0
    found = evaluate(problem, Assignment((0, 0, 0), (0, 0, 1)))
    assert found.excess_bytes == 3
    assert not is_feasible(problem, found)
    assert found.stages[0].kv_bytes == 6
    assert found.stages[0].weight_bytes == 19


def test_quality_budget_is_part_of_feasibility() -> None:
    tight = two_stages("steady", quality_budget=0.29)
    loose = two_stages("steady", quality_budget=0.3)
    assert not is_feasible(tight, evaluate(tight, SPLIT))
    assert is_feasible(loose, evaluate(loose, SPLIT))
