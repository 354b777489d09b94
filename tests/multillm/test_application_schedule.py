"""Application schedules: written as read, checked against application and cluster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.builders import cluster_of, plan_request

from llmpq.assigner import make_plan
from llmpq.errors import SpecError
from llmpq.multillm.graph import Application
from llmpq.multillm.schedule import (
    ApplicationSchedule,
    ModelReplica,
    application_digest,
    cluster_digest,
    load_schedule,
    plans_of,
    write_schedule,
)
from llmpq.spec.fields import Fields, from_json, to_json
from llmpq.spec.plan import Plan, write_plan

CLUSTER = cluster_of(("T4-16G", 2, 0), ("V100-32G", 1, 1))
T4S, V100 = ("node0/T4-16G#0", "node0/T4-16G#1"), "node1/V100-32G#0"


def app_of(**changes) -> Application:
    found = {
        "schema": 1,
        "name": "judged",
        "models": [{"name": "writer", "model": "w"}, {"name": "judge", "model": "j"}],
        "nodes": [
            {"name": "draft", "model": "writer", "requests": "a/d.jsonl", "max_new_tokens": 9},
            {"name": "grade", "model": "judge", "templates": ["{draft}"], "max_new_tokens": 2},
        ],
        "edges": [{"from": "draft", "to": "grade"}],
    } | changes
    return from_json(Application, Fields(found, "app.json"))


def tp(model: str, node: str, *devices: str) -> dict:
    replica = {"devices": list(devices), "tensor_parallel": len(devices)}
    return {"model": model, "nodes": [node], "replicas": [replica], "requests": {node: 3}}


def record(**changes) -> dict:
    app = app_of()
    return {
        "schema": 1,
        "application": app.name,
        "application_digest": application_digest(app),
        "cluster": CLUSTER.name,
        "cluster_digest": cluster_digest(CLUSTER),
        "method": "greedy",
        "stages": [
            {"start_s": 0, "end_s": 2.5, "models": [tp("writer", "draft", *T4S)]},
            {"start_s": 2.5, "end_s": 4, "models": [tp("judge", "grade", V100)]},
        ],
        "provenance": {"command": "test", "version": "0", "inputs": {}},
    } | changes


def read(value: dict) -> ApplicationSchedule:
    return from_json(ApplicationSchedule, Fields(json.loads(json.dumps(value)), "s.json"))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(plan_request(), "uniform", command="test")


def test_a_schedule_answers_about_its_stages():
    found = read(record())
    found.check(app_of(), CLUSTER)
    assert found.makespan_s == 4
    assert [one.plan_name for _, one in found.entries()] == ["tp2", "tp1"]
    assert found.stages[0].of("writer").devices == T4S
    assert found.stages[0].of("judge") is None


def test_a_schedule_is_written_as_it_is_read(tmp_path, plan):
    cluster = plan.cluster
    devices = tuple(device.label for device in cluster.devices)
    write_plan(tmp_path / "plans" / "w.json", plan)
    found = read(record(bound_s=3.5, idle_s=0.5))
    own = ModelReplica(devices=devices, strategy="plans/w.json")
    inline = ModelReplica(devices=devices, plan=plan)
    stages = tuple(
        replace(stage, models=(replace(stage.models[0], replicas=(one,)),))
        for stage, one in zip(found.stages, (own, inline), strict=True)
    )
    found = replace(found, stages=stages)
    write_schedule(tmp_path / "s.json", found)
    again = load_schedule(tmp_path / "s.json")
    assert again.stages[1] == found.stages[1]
    assert again.stages[0].models[0].replicas[0].strategy == str(tmp_path / "plans/w.json")
    assert set(plans_of(again, cluster).values()) == {plan}
    assert to_json(found) == json.loads((tmp_path / "s.json").read_text())


def test_digests_ignore_folders_and_notice_changes():
    moved = app_of()
    moved = replace(moved, nodes=(replace(moved.nodes[0], requests="/b/d.jsonl"), moved.nodes[1]))
    assert application_digest(moved) == application_digest(app_of())
    other = replace(moved, nodes=(replace(moved.nodes[0], max_new_tokens=8), moved.nodes[1]))
    assert application_digest(other) != application_digest(app_of())
    assert cluster_digest(cluster_of(("T4-16G", 3, 0))) != cluster_digest(CLUSTER)


def stages(*models: list[dict]) -> dict:
    return {
        "stages": [
            {"start_s": number, "end_s": number + 1, "models": found}
            for number, found in enumerate(models)
        ]
    }


DRAFT, GRADE = tp("writer", "draft", *T4S), tp("judge", "grade", V100)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (stages([DRAFT | {"replicas": [{"devices": [V100]}]}]), "one of strategy, plan"),
        (stages([DRAFT | {"replicas": [{"devices": [V100], "tensor_parallel": 2}]}]), "2 devices"),
        (stages([DRAFT, tp("judge", "grade", T4S[1])]), "T4-16G#1 2 times"),
        (stages([DRAFT, tp("writer", "grade", V100)]), "writer 2 times"),
        (stages([DRAFT, tp("judge", "draft", V100)]), "draft 2 times"),
        (stages([DRAFT], []), "models"),
        ({"stages": [{"start_s": 2, "end_s": 1, "models": [DRAFT]}]}, "at least start_s"),
        ({"stages": [{"start_s": 0, "end_s": 3, "models": [DRAFT]},
                     {"start_s": 1, "end_s": 4, "models": [GRADE]}]}, "stages[1].start_s"),
        ({"bound": 3}, "field 'bound'"),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_error_with_its_field(change, message):
    with pytest.raises(SpecError) as error:
        read(record(**change))
    assert "s.json" in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"application_digest": "0"}, "field 'application_digest': found '0'"),
        ({"cluster_digest": "0"}, "the cluster has changed"),
        (stages([DRAFT], [tp("critic", "grade", V100)]), "stages[1].models[0].model': found 'crit"),
        (stages([tp("writer", "grade", V100)]), "stages[0].models[0].nodes': found 'grade'"),
        (stages([DRAFT | {"requests": {"x": 1}}]), "stages[0].models[0].requests': found 'x'"),
        (stages([tp("writer", "draft", "node9/T4-16G#0")]), "models[0].replicas[0].devices'"),
        (stages([DRAFT]), "no stage with node 'grade'"),
        (stages([GRADE], [DRAFT]), "node 'grade' before its producer 'draft'"),
    ],
)
def test_a_schedule_of_something_else_is_refused(change, message):
    with pytest.raises(SpecError) as error:
        read(record(**change)).check(app_of(), CLUSTER)
    assert message in str(error.value)


def test_only_strategies_on_their_devices_are_run(plan, tmp_path):
    with pytest.raises(SpecError, match=r"stages\[0\].models\[0\].replicas\[0\].tensor_parallel"):
        plans_of(read(record()), CLUSTER)
    count = len(plan.cluster.devices)
    path = Path(tmp_path / "w.json")
    write_plan(path, plan)
    cluster = cluster_of(("T4-16G", count, 0))
    labels = [device.label for device in cluster.devices]
    for devices, message in ((labels, "those of its plan"), (labels[1:], "of the plan's cluster")):
        found = DRAFT | {"replicas": [{"devices": devices, "strategy": str(path)}]}
        with pytest.raises(SpecError, match=message):
            plans_of(read(record(**stages([found]))), cluster)
