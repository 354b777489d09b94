"""llmpq-apps run on bad input: one clear error, before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.ranks import cpu_cluster, make_plan
from helpers.schedules import schedule_on

from llmpq.cli.apps.command import main
from llmpq.cli.apps.run import _schedule_of
from llmpq.multillm.graph import Application, AppModel, AppNode, Edge
from llmpq.multillm.schedule import ModelReplica, ScheduledModel, write_schedule
from llmpq.spec.fields import to_json

CLUSTER = cpu_cluster(2)
PLAN = make_plan((0, 3), prompt_tokens=30, new_tokens=10)


def app_of() -> Application:
    return Application(
        name="graded",
        models=(AppModel(name="w", model="m"), AppModel(name="g", model="m")),
        nodes=(
            AppNode(name="draft", model="w", requests="r.jsonl", max_new_tokens=8),
            AppNode(name="grade", model="g", templates=("Grade: {draft}",), max_new_tokens=2),
        ),
        edges=(Edge(source="draft", target="grade"),),
    )


def schedule_of(app: Application):
    labels = [device.label for device in CLUSTER.devices]
    entries = [
        ScheduledModel(
            model=model, nodes=(node,), replicas=(ModelReplica(devices=(label,), plan=PLAN),)
        )
        for model, node, label in zip("wg", ("draft", "grade"), labels, strict=True)
    ]
    return schedule_on(app, CLUSTER, entries)


def command(folder: Path, app: dict, *words: str) -> int:
    """Run the command on files of an application and a schedule of another graph."""
    (folder / "r.jsonl").write_text('{"id": 1, "prompt": "x"}\n')
    (folder / "app.json").write_text(json.dumps(app))
    (folder / "cluster.json").write_text(json.dumps(to_json(CLUSTER)))
    write_schedule(folder / "schedule.json", schedule_of(app_of()))
    files = {"cluster": "cluster.json", "schedule": "schedule.json", "output": "out"}
    options = [word for name, file in files.items() for word in (f"--{name}", str(folder / file))]
    return main(["run", str(folder / "app.json"), *options, *words])


def test_a_ray_cluster_that_is_not_used_is_an_error(tmp_path, capsys):
    assert command(tmp_path, to_json(app_of()), "--ray_address", "head:6379") == 2
    assert "--ray_address: found without --launcher ray" in capsys.readouterr().err


def test_a_schedule_is_planned_or_that_of_the_folder_is_used(tmp_path, monkeypatch):
    """A resumed run goes on with the schedule that it began with."""
    planned, began = [], schedule_of(app_of())
    monkeypatch.setattr(
        "llmpq.cli.apps.run.planned_of",
        lambda *_: planned.append(1) or SimpleNamespace(schedule=began),
    )
    options = SimpleNamespace(schedule=None, output=tmp_path)
    assert _schedule_of(options, app_of(), CLUSTER) == began
    assert planned == [1]
    write_schedule(tmp_path / "schedule.json", began)
    assert _schedule_of(options, app_of(), CLUSTER) == began
    assert planned == [1]


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ({}, ["--model", "w"], "--model: found 'w', expected NAME=DIR"),
        ({}, ["--model", "w=nowhere"], "nowhere: no such directory, expected weights of 'w'"),
        ({}, [], "model 'w': found no folder of weights in "),
        ({"name": "other"}, [], "field 'application_digest': found "),
        ({"edges": [{"from": "draft", "to": "grade"}, {"from": "grade", "to": "draft"}]}, [],
         "app.json: field 'nodes[0].requests': found 'r.jsonl', expected none"),
    ],
)  # fmt: skip
def test_the_command_says_what_is_wrong(tmp_path, capsys, change, words, message):
    assert command(tmp_path, to_json(app_of()) | change, *words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
