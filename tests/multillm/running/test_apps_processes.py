"""llmpq-apps run with ranks as processes: tokens of separate runs, also when it is killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers.byte_tokenizer import TOKENS, write_byte_tokenizer
from helpers.clocks import PATIENCE_S
from helpers.processes import is_running, workers_of
from helpers.ranks import cpu_cluster, make_plan
from helpers.schedules import schedule_on
from helpers.tiny_models import generate_alone, load_reference
from openai.types import Completion

from llmpq.cli.apps.command import main
from llmpq.dist.io.results import read_lines
from llmpq.multillm.graph import load_application
from llmpq.multillm.running.dataflow import Dataflow
from llmpq.multillm.running.journal import ANSWERS, RequestAnswer, read_answers
from llmpq.multillm.schedule import ModelReplica, ScheduledModel, write_schedule
from llmpq.multillm.workload import load_items
from llmpq.spec.fields import dump_json, to_json

pytestmark = [pytest.mark.dist, pytest.mark.slow]
torch.set_num_threads(1)

CLUSTER = cpu_cluster(2)
FIRST, SECOND = (device.label for device in CLUSTER.devices)
MODELS = {
    "small": ("llama", {"seed": 1, "vocab_size": len(TOKENS), "max_position_embeddings": 256}),
    "wide": ("opt", {"seed": 2, "vocab_size": len(TOKENS), "max_position_embeddings": 256}),
    "deep": ("qwen2", {"seed": 3, "vocab_size": len(TOKENS), "max_position_embeddings": 256}),
}
APP = {
    "schema": 1,
    "name": "all-patterns",
    "nodes": [
        {"name": "route", "model": "small", "requests": "q.jsonl", "max_new_tokens": 6},
        {"name": "talk", "model": "wide", "templates": ["{prompt}: {route}"], "max_new_tokens": 7},
        {"name": "summary", "model": "deep", "requests": "d.jsonl", "max_new_tokens": 8,
         "templates": ["{summary}+{prompt}"]},
        {"name": "judge", "model": "small", "max_new_tokens": 5,
         "templates": ["{talk}{route}{summary}!", "{summary}{talk}{route}?"]},
    ],
    "edges": [
        {"from": "route", "to": "talk", "when": "\ufffd"},
        {"from": "summary", "to": "summary"},
        {"from": "route", "to": "judge"},
        {"from": "talk", "to": "judge"},
        {"from": "summary", "to": "judge"},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tiny_model, tmp_path_factory) -> dict[str, Path]:
    found = {}
    for name, (family, options) in MODELS.items():
        found[name] = tmp_path_factory.mktemp(name)
        for path in tiny_model(family, **options).iterdir():
            (found[name] / path.name).write_bytes(path.read_bytes())
        write_byte_tokenizer(found[name])
    return found


@pytest.fixture(scope="module")
def files(folders, tmp_path_factory) -> Path:
    """An application of three models on two devices that hold two of them."""
    folder = tmp_path_factory.mktemp("app")
    questions = [{"id": n, "prompt": f"Question {n} of many"} for n in range(8)]
    documents = [
        {"id": f"d{n}", "prompt": [f"chunk {k} of {n}" for k in range(1 + n % 3)]} for n in range(5)
    ]
    for name, lines in (("q", questions), ("d", documents)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    models = [{"name": name, "model": str(path)} for name, path in folders.items()]
    (folder / "app.json").write_text(json.dumps({**APP, "models": models}))
    (folder / "cluster.json").write_text(dump_json(to_json(CLUSTER)))
    app = load_application(folder / "app.json")
    plan = make_plan((0, 3), batch=4, prompt_tokens=200, new_tokens=8)

    def entry(model: str, nodes: str, *labels: str) -> ScheduledModel:
        replicas = tuple(ModelReplica(devices=(label,), plan=plan) for label in labels)
        return ScheduledModel(model=model, nodes=tuple(nodes.split()), replicas=replicas)

    stages = [
        [entry("small", "route", FIRST), entry("deep", "summary", SECOND)],
        [entry("wide", "talk", FIRST), entry("deep", "summary", SECOND)],
        [entry("small", "judge", FIRST, SECOND)],
    ]
    write_schedule(folder / "schedule.json", schedule_on(app, CLUSTER, *stages))
    return folder


@pytest.fixture(scope="module")
def expected(files, folders) -> dict:
    """What transformers generates for every prompt alone."""
    app = load_application(files / "app.json")
    flow, found = Dataflow(app, load_items(app)), {}
    from llmpq.server.text.tokenizer import load_server_tokenizer  # noqa: PLC0415  starts a process

    tokenizer = load_server_tokenizer(folders["small"])
    references = {name: load_reference(path) for name, path in folders.items()}
    waiting = flow.begin()
    while waiting:
        ready = waiting.pop()
        prompt = tokenizer.encode(ready.prompt)
        model = references[app.node(ready.key.node).model]
        tokens = generate_alone(model, prompt, ready.max_new_tokens)[0][len(prompt) :]
        found[ready.key] = tuple(tokens)
        waiting += flow.answer(ready.key, tokenizer.decode(tokens))
    return found


def words(files: Path, output: Path, *more: str) -> list[str]:
    options = ["--cluster", str(files / "cluster.json"), "--schedule", str(files / "schedule.json")]
    return ["run", str(files / "app.json"), *options, "--output", str(output), "--json", *more]


def tokens_of(folder: Path) -> dict:
    answers: list[RequestAnswer] = read_answers(folder / ANSWERS)
    found = {one.key: one.token_ids for one in answers}
    assert len(found) == len(answers)
    return found


def test_answers_are_those_of_separate_runs(files, expected, tmp_path, capsys):
    picture = tmp_path / "stages.png"
    status = main(words(files, tmp_path, "--format", "openai_batch", "--plot", str(picture)))
    report = json.loads(capsys.readouterr().out)
    assert status == 0
    assert tokens_of(tmp_path) == expected
    assert picture.stat().st_size > 0
    assert sum(report["requests"].values()) == len(expected)
    loaded = [one["load_s"] for one in report["replicas"] if one["load_s"] is not None]
    assert min(loaded, default=0) > 0  # a replica may be stopped before it is loaded
    assert report["makespan_s"]["measured"] > 0
    lines = [
        line
        for node in APP["nodes"]
        for line in read_lines(tmp_path / f"{node['name']}.batch.jsonl")
    ]
    bodies = [line.take("response")["body"] for line in lines]
    assert sum(len(Completion.model_validate(one).choices) for one in bodies) == len(expected)
    assert main(words(files, tmp_path, "--resume")) == 0  # nothing is left to do
    assert not json.loads(capsys.readouterr().out)["replicas"]
    assert main(words(files, tmp_path)) == 2


def started(files: Path, output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "llmpq.cli.apps.command", *words(files, output, "--resume")]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


KILLS = int(os.environ.get("LLMPQ_TEST_KILLS", "3"))
"""More than a test needs are for a trial by hand."""


def test_killed_at_random_moments_every_request_is_answered_once(files, expected, tmp_path):
    chance = random.Random(7)
    for _ in range(KILLS):
        process = started(files, tmp_path)
        time.sleep(chance.uniform(0.5, 12))
        workers = list(workers_of(process.pid).values())
        if workers and chance.random() < 0.5:  # a rank: the engine starts it again
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(workers), signal.SIGKILL)
            time.sleep(chance.uniform(0, 5))
        workers = list(workers_of(process.pid).values())
        process.kill()
        process.wait()
        deadline = time.monotonic() + PATIENCE_S
        while any(map(is_running, workers)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert started(files, tmp_path).wait(timeout=PATIENCE_S) == 0
    assert tokens_of(tmp_path) == expected
