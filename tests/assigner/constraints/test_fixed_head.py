"""A head of fewer bits in plans: bytes, seconds, and the proof."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.brute_force import brute_force
from helpers.builders import plan_request, sensitivity

from llmpq.assigner import make_plan
from llmpq.assigner.constraints.resolve import Overrides
from llmpq.assigner.request import build_task, omega_of
from llmpq.cli.render import plan_table
from llmpq.costmodel.memory import head_bytes, head_rows
from llmpq.errors import SpecError
from llmpq.spec.plan import plan_text, read_plan


def request_of(head, **options):
    return plan_request(overrides=Overrides(head_bits=head), **options)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("solver", ["exact", "highs"])
def test_plans_equal_brute_force(bits, solver):
    request = request_of(bits, solver=solver, theta_s=0.01, bits=(16, 4), layer_group=2)
    task = build_task(request)
    problems = [task.problem(pair, order) for pair in task.pairs for order in task.orders()[1]]
    found = [brute_force(problem) for problem in problems]
    best = min(item[1].objective_s for item in found if item is not None)
    plan = make_plan(request)
    assert plan.head_bits == bits
    assert plan.estimate.objective_s == pytest.approx(best, rel=1e-6)


TABLE = replace(sensitivity(plan_request().model), head=((3, 9e-3), (4, 2e-3), (8, 1e-4)))
WIDTHS = (16, 8, 4)


@pytest.mark.parametrize("solver", ["exact", "highs"])
@pytest.mark.parametrize(
    ("theta_s", "budget"), [(0.0, None), (2e-3, None), (9.0, None), (0.0, 0.4)]
)
def test_the_best_head_is_that_of_brute_force(theta_s, budget, solver):
    request = plan_request(
        head_bits=WIDTHS,
        sensitivity=TABLE,
        theta_s=theta_s,
        quality_budget=budget,
        solver=solver,
        bits=(16, 4),
        layer_group=2,
    )
    layers = np.add.reduceat(omega_of(request), [0, 2, 4], axis=0)
    best = {}
    for bits in WIDTHS:
        task, lost = build_task(replace(request, head_bits=(bits,))), TABLE.normalised_head(bits)
        left = None if budget is None else budget - lost
        problems = (task.problem(pair, order) for pair in task.pairs for order in task.orders()[1])
        found = [brute_force(replace(one, omega=layers, quality_budget=left)) for one in problems]
        best[bits] = min(one[1].objective_s for one in found if one is not None) + theta_s * lost
    plan = make_plan(request)
    assert plan.estimate.objective_s == pytest.approx(min(best.values()), rel=1e-6)
    assert best[plan.head_width] == pytest.approx(min(best.values()), rel=1e-6)
    assert plan.search.status == "optimal"
    assert plan.search.bound_s <= plan.estimate.objective_s * (1 + 1e-9)


def test_what_the_head_loses_counts_in_the_plan_and_in_its_check():
    found = {}
    for head in (None, 4):
        for table in (None, TABLE):
            plan = make_plan(request_of(head, sensitivity=table, bits=(16,)))
            found[head, table is TABLE] = plan.estimate.quality
    assert found[None, False] == found[None, True] == 0.0
    assert found[4, False] == pytest.approx(0.5)  # of what all layers lose at 4 bits
    assert found[4, True] == pytest.approx(TABLE.normalised_head(4))
    plan = make_plan(request_of(4))
    text = plan_table(plan, dict.fromkeys(plan.dropped_devices, ""))
    assert "of the quality lost 0.5 (default: half of what all layers lose)" in text


def test_a_choice_of_heads_is_for_a_single_plan():
    with pytest.raises(SpecError, match="only the search for a single plan"):
        build_task(plan_request(head_bits=WIDTHS))


def test_a_narrower_head_takes_less_memory_and_time():
    request, four = request_of(None), request_of(4)
    plain, narrow = build_task(request), build_task(four)
    model = request.model
    saved = 2 * model.head_weights - head_bytes(model, "float16", 4)
    for before, after in zip(plain.pairs, narrow.pairs, strict=True):
        assert (before.master_bytes - after.master_bytes == saved).all()
        assert (after.master_decode_s < before.master_decode_s).all()


def test_a_plan_without_the_field_has_a_head_of_16_bits(tmp_path):
    plan = make_plan(request_of(None))
    assert "head_bits" not in plan_text(plan)
    assert plan.head_width == 16
    narrow = make_plan(request_of(8), command="test")
    narrow.save(tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == narrow
    assert "head at 8 bits" in narrow.summary()


def test_rows_are_filled_up_to_the_kernel_s_multiple():
    model = plan_request().model
    assert head_rows(model) % 16 == 0
    assert 0 <= head_rows(model) - model.vocab_size < 16


def test_other_bits_are_refused():
    with pytest.raises(SpecError, match="--fix_bits head: found 5"):
        request_of(5)
