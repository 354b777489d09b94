"""llmpq-apps plan and simulate."""

from __future__ import annotations

import contextlib
import io
import json

import pytest

from llmpq.cli.apps import command
from llmpq.multillm.graph import load_application
from llmpq.multillm.schedule import load_schedule
from llmpq.spec.cluster import load_cluster

CLUSTER = {
    "schema": 1,
    "name": "two",
    "nodes": [
        {"name": "a", "devices": [{"type": "V100-32G", "count": 1}]},
        {"name": "b", "devices": [{"type": "T4-16G", "count": 1}]},
    ],
}
APP = {
    "schema": 1,
    "name": "judged",
    "models": [
        {"name": "small", "model": "facebook/opt-125m", "lengths": "lengths.json"},
        {"name": "large", "model": "facebook/opt-1.3b", "lengths": "lengths.json"},
        {"name": "judge", "model": "facebook/opt-350m"},
    ],
    "nodes": [
        {"name": "first", "model": "small", "requests": "r.jsonl", "max_new_tokens": 60},
        {"name": "second", "model": "large", "requests": "r.jsonl", "max_new_tokens": 60},
        {
            "name": "verdict",
            "model": "judge",
            "templates": ["Which is better? {first} {second}"],
            "max_new_tokens": 8,
        },
    ],
    "edges": [{"from": "first", "to": "verdict"}, {"from": "second", "to": "verdict"}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("apps")
    lengths = {"schema": 1, "lengths": [10, 40, 80], "probabilities": [0.25, 0.5, 0.25]}
    for name, record in (("cluster", CLUSTER), ("app", APP), ("lengths", lengths)):
        (path / f"{name}.json").write_text(json.dumps(record))
    lines = [json.dumps({"id": number, "prompt_tokens": 20 + number}) for number in range(30)]
    (path / "r.jsonl").write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def planned(folder):
    """Return the folder of a schedule, and what planning it printed."""
    out = folder / "out"
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        words = [*files(folder), "--json", "--output", str(out), "--time_limit", "1"]
        assert command.main(["plan", *words]) == 0
    return out, json.loads(text.getvalue())


def files(folder, cluster="cluster.json"):
    return [str(folder / "app.json"), "--cluster", str(folder / cluster)]


def test_plan_writes_a_schedule_that_fits_and_prints_one_object(folder, planned):
    out, record = planned
    schedule = load_schedule(out / "schedule.json")
    schedule.check(load_application(folder / "app.json"), load_cluster(folder / "cluster.json"))
    assert record["makespan_s"]["predicted"] == schedule.makespan_s
    assert record["makespan_s"]["measured"] is None
    assert record["makespan_s"]["predicted"] <= min(record["others_s"].values())
    assert record["bound_s"] <= record["makespan_s"]["predicted"]
    finished = sum(one["requests"] for stage in record["stages"] for one in stage["models"])
    assert finished == 90
    assert set(record) >= {"idle_s", "search_s", "stages"}
    assert set(record["stages"][0]["models"][0]) >= {"model", "plan", "devices", "requests"}
    assert (out / "schedule.png").stat().st_size > 10_000


@pytest.mark.parametrize(("seed", "tolerance"), [(0, 1e-6), (5, 0.3)])
def test_simulate_plays_a_schedule_with_the_same_or_other_lengths(
    folder, planned, capsys, seed, tolerance
):
    words = ["--schedule", str(planned[0] / "schedule.json"), "--play_seed", str(seed), "--json"]
    assert command.main(["simulate", *files(folder), *words]) == 0
    times = json.loads(capsys.readouterr().out)["makespan_s"]
    assert times["simulated"] == pytest.approx(times["predicted"], rel=tolerance)


def test_the_table_names_stages_models_and_devices(folder, planned, capsys):
    words = ["--schedule", str(planned[0] / "schedule.json")]
    assert command.main(["simulate", *files(folder), *words]) == 0
    text = capsys.readouterr().out
    for word in ("stage", "large", "a/V100-32G", "makespan", "idle", "search", "simulated"):
        assert word in text


def test_a_schedule_of_another_cluster_is_refused(folder, planned, capsys):
    other = json.loads(json.dumps(CLUSTER))
    other["nodes"][0]["devices"][0]["count"] = 2
    (folder / "other.json").write_text(json.dumps(other))
    words = ["--schedule", str(planned[0] / "schedule.json")]
    assert command.main(["simulate", *files(folder, "other.json"), *words]) == 2
    assert "cluster_digest" in capsys.readouterr().err
