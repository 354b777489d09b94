"""Strategy files say where weights rest: version 2 where some rest on disk, else version 1."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from helpers.ranks import make_plan, with_weights_on_disk

from llmpq.errors import SpecError
from llmpq.spec.plan import plan_text, read_plan, write_plan

PLAN = make_plan((0, 2, 4))


def test_version_2_is_written_only_where_weights_rest_on_disk(tmp_path):
    file = tmp_path / "plan.json"
    for plan, version in ((PLAN, 1), (with_weights_on_disk(PLAN, {1, 2}), 2)):
        write_plan(file, plan)
        fields = json.loads(file.read_text())
        assert fields["schema"] == version
        assert ("weights" in fields["stages"][0]) == (version == 2)
        assert read_plan(file) == plan
        assert plan_text(read_plan(file)) == file.read_text()


def test_layers_on_disk_are_those_of_the_stage():
    plan = with_weights_on_disk(PLAN, {1, 2})
    assert [stage.on_disk for stage in plan.stages] == [(1,), (0,)]
    assert "1 read from disk" in plan.summary()
    assert "from disk" not in PLAN.summary()


@pytest.mark.parametrize(
    ("version", "weights", "message"),
    [
        (1, ["disk", "disk"], r"field 'schema': found 1, expected 2, which has fields"),
        (2, ["disk"], r"stages\[0\]\.weights': found 1 entries, expected 2, one for each layer"),
        (2, ["ram", "disk"], r"stages\[0\]\.weights.*found 'ram', expected one of disk, resident"),
        (3, ["disk", "disk"], r"field 'schema': found 3, expected a whole number in \[1, 2\]"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, version, weights, message):
    fields = json.loads(plan_text(PLAN))
    fields["schema"] = version
    fields["stages"][0]["weights"] = weights
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(fields))
    with pytest.raises(SpecError, match=message):
        read_plan(file)


def test_files_of_version_1_with_all_resident_are_read_and_stay():
    assert replace(PLAN, stages=PLAN.stages).schema == 1
