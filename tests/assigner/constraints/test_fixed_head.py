"""A head of fewer bits in plans: bytes, seconds, and the proof."""

from __future__ import annotations

import pytest
from helpers.brute_force import brute_force
from helpers.builders import plan_request

from llmpq.assigner import make_plan
from llmpq.assigner.constraints.overrides import Overrides
from llmpq.assigner.request import build_task
from llmpq.costmodel.stored import head_bytes, head_rows
from llmpq.errors import SpecError
from llmpq.spec.plan import plan_text, read_plan


def request_of(head, **options):
    return plan_request(overrides=Overrides(head_bits=head), **options)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("solver", ["exact", "highs"])
def test_plans_equal_brute_force(bits, solver):
    request = request_of(bits, solver=solver, theta_s=0.01, bits=(16, 4), layer_group=2)
    task = build_task(request)
    problems = [task.problem(pair, order) for pair in task.pairs for order in task.orders()]
    found = [brute_force(problem) for problem in problems]
    best = min(item[1].objective_s for item in found if item is not None)
    plan = make_plan(request)
    assert plan.head_bits == bits
    assert plan.estimate.objective_s == pytest.approx(best, rel=1e-6)


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
