"""Plans with stages of their own for prefill and decode: what they are, and what is none."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from helpers.ranks import make_plan, make_split_plan

from llmpq.errors import SpecError
from llmpq.spec.fields import Fields, from_json
from llmpq.spec.plan import Plan, default_schedule, plan_text
from llmpq.spec.precision import Phase

BITS = (16, 8, 4)
PLAN = make_split_plan((0, 2, 3), (0, 1, 3), bits=BITS, prefill=2, decode=4, batch=8)
ONE = make_plan((0, 2, 3), bits=BITS)


def test_either_phase_has_its_way_and_both_copies_are_one_model():
    assert PLAN.is_split
    assert PLAN.bits == BITS
    assert PLAN.path(Phase.DECODE) == (0, 1)
    assert PLAN.path(Phase.PREFILL) == (0, 2, 3)
    assert [stage.rank for stage in PLAN.stages_of(Phase.PREFILL)] == [2, 3]
    assert not ONE.is_split
    assert ONE.path(Phase.PREFILL) == ONE.path(Phase.DECODE) == (0, 1)
    assert ONE.stages_of(Phase.PREFILL) == ONE.stages


def test_a_stage_that_prefills_has_slots_for_two_micro_batches_of_prompts():
    work = PLAN.workload
    assert PLAN.slots_of(PLAN.stages[3]) == (2 * 2, work.prompt_tokens)
    assert PLAN.slots_of(PLAN.stages[0]) == (8, work.max_context_tokens)


def test_a_file_keeps_the_phases_and_files_without_any_stay_as_they_were():
    text = plan_text(PLAN)
    assert [stage["phase"] for stage in json.loads(text)["stages"]] == [
        "decode", "decode", "prefill", "prefill",
    ]  # fmt: skip
    assert from_json(Plan, Fields(json.loads(text), "file")) == PLAN
    assert "phase" not in plan_text(ONE)


def _with(rank: int, **changes):
    stages = list(PLAN.stages)
    stages[rank] = replace(stages[rank], **changes)
    return {"stages": tuple(stages)}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        (_with(0, phase=None), "phase"),
        (_with(0, phase=Phase.PREFILL), "phase"),
        (_with(3, phase=Phase.DECODE), "start at 3"),
        ({"stages": tuple(replace(stage, phase=Phase.DECODE) for stage in ONE.stages)}, "phase"),
        (_with(3, end_layer=2, bits=(8,)), "layers covered"),
        (_with(2, first_layer=1, bits=()), "start at 0"),
        (_with(2, bits=(8,)), "two copies"),
        ({"schedule": None}, "expected 'waa'"),
        ({"schedule": default_schedule("rra", 8)}, "expected 'waa'"),
    ],
)
def test_what_is_no_split_plan_is_refused(changes, names):
    with pytest.raises(SpecError, match=names):
        replace(PLAN, **changes)
