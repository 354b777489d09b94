"""Replicas of applications on a Ray cluster of two nodes of this host: a lane of its own.

``scripts/check -m ray`` in an environment with ``llmpq[ray]``.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
from pathlib import Path

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs llmpq[ray]", allow_module_level=True)

from helpers.byte_tokenizer import TOKENS, write_byte_tokenizer
from helpers.processes import is_running, wait_for
from helpers.ranks import make_plan
from helpers.ray_fleet import LABEL, NODES, children_of, cluster
from helpers.schedules import schedule_on
from helpers.tiny_models import generate_alone, load_reference
from ray import get, get_runtime_context
from ray.util.placement_group import placement_group_table

from llmpq.cli.apps.command import main
from llmpq.dist.io.generation import GenerationRequest
from llmpq.dist.io.sampling_params import SamplingParams
from llmpq.errors import CapacityError, SpecError, StageError
from llmpq.multillm.graph import load_application
from llmpq.multillm.schedule import ModelReplica, ScheduledModel, write_schedule
from llmpq.server.ray import launcher as ray_launcher
from llmpq.server.ray.engines import RayEngines
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.devices.figures import DeviceEntry
from llmpq.spec.fields import dump_json, to_json
from llmpq.spec.plan import Plan

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


def cpus(*names: str) -> Cluster:
    """Return nodes with a device of a type of its own each."""
    groups = {name: (DeviceGroup(type=name, count=1, threads=1),) for name in names}
    nodes = tuple(Node(name=f"on-{name}", devices=found) for name, found in groups.items())
    types = tuple(DeviceEntry(type=name, like="cpu") for name in names)
    return Cluster(name="cpus", nodes=nodes, device_types=types)


CLUSTER = cpus(*NODES)
FIRST, SECOND = (device.label for device in CLUSTER.devices)
PLAN = make_plan((0, 3), prompt_tokens=80, new_tokens=40, cluster=cpus(NODES[0]))
SECOND_PLAN = make_plan((0, 3), prompt_tokens=80, new_tokens=40, cluster=cpus(NODES[1]))
PROMPT = [7, 8, 9, 10]


@pytest.fixture(scope="module")
def nodes():
    assert ray_launcher.LABEL == LABEL
    with cluster():
        yield


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("small")
    options = {"seed": 1, "vocab_size": len(TOKENS), "max_position_embeddings": 256}
    for path in tiny_model("llama", **options).iterdir():
        (found / path.name).write_bytes(path.read_bytes())
    write_byte_tokenizer(found)
    return found


def request(name: str, tokens: int) -> GenerationRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
    return GenerationRequest(id=name, prompt_token_ids=tuple(PROMPT), sampling=sampling)


async def answer(engine, name: str, tokens: int, known=()) -> list[int]:
    found = list(known)
    async for output in engine.generate(request(name, tokens), known):
        found += output.token_ids
    return found


def states() -> list[str]:
    return [group["state"] for group in placement_group_table().values()]


def node_of(engine) -> str:
    def label(_) -> str:
        return get_runtime_context().get_node_labels()[LABEL]

    return get(engine._actor.__ray_call__.remote(label))


def pid_of(engine) -> int:
    return get(engine._actor.__ray_call__.remote(lambda _: os.getpid()))


def test_a_replica_runs_on_the_node_of_its_device_and_leaves_nothing(nodes, folder):
    expected = generate_alone(load_reference(folder), PROMPT, 20)[0][len(PROMPT) :]

    async def run() -> set[int]:
        engines = RayEngines(cluster=CLUSTER)
        first, second = await asyncio.gather(
            engines(PLAN, folder, (FIRST,)), engines(SECOND_PLAN, folder, (SECOND,))
        )
        try:
            assert [node_of(engine) for engine in (first, second)] == list(NODES)
            assert states().count("CREATED") == 2
            answers = (answer(one, name, 20) for one in (first, second) for name in "xy")
            assert await asyncio.gather(*answers) == [expected] * 4
            stream = first.generate(request("left", 30))
            begun = (await anext(stream)).token_ids
            await stream.aclose()
            rest = await answer(second, "left", 20, begun)  # it goes on elsewhere
            assert rest == expected
            assert await answer(first, "left", 20) == expected  # its id is free again
            return children_of(pid_of(first)) | children_of(pid_of(second))
        finally:
            await asyncio.gather(first.close(), second.close())

    processes = asyncio.run(run())
    assert len(processes) >= 4  # actors and ranks
    wait_for(lambda: any(map(is_running, processes)), lambda running: not running)
    wait_for(states, lambda found: "CREATED" not in found)


def test_a_node_that_ray_lacks_and_weights_that_are_missing_are_errors(nodes, folder, tmp_path):
    other = cpus("cpu-c")
    lacking = RayEngines(cluster=other, place_timeout_s=1.0)
    with pytest.raises(CapacityError, match=f"expected one with the label {LABEL}=cpu-c and 1 CPU"):
        asyncio.run(lacking(PLAN, folder, (other.devices[0].label,)))
    with pytest.raises(SpecError, match=str(tmp_path)):
        asyncio.run(RayEngines(cluster=CLUSTER)(PLAN, tmp_path / "none", (FIRST,)))
    two = make_plan((0, 2, 3), prompt_tokens=80, new_tokens=40)
    with pytest.raises(SpecError, match="found several nodes, expected devices of one"):
        asyncio.run(RayEngines(cluster=CLUSTER)(two, folder, (FIRST, SECOND)))
    wait_for(states, lambda found: "CREATED" not in found)


def test_a_lost_actor_is_one_error_that_names_the_replica(nodes, folder):
    async def run() -> None:
        engine = await RayEngines(cluster=CLUSTER)(PLAN, folder, (FIRST,))
        try:
            stream = engine.generate(request("lost", 40))
            await anext(stream)
            os.kill(pid_of(engine), signal.SIGKILL)
            async for _ in stream:
                pass
        finally:
            await engine.close()

    with pytest.raises(StageError, match=f"replica on {FIRST}: Ray lost its actor"):
        asyncio.run(run())


def test_the_command_runs_an_application_on_the_cluster(nodes, folder, tmp_path, capsys):
    lines = [json.dumps({"id": n, "prompt": f"Question {n}"}) + "\n" for n in range(6)]
    (tmp_path / "q.jsonl").write_text("".join(lines))
    app = {
        "schema": 1,
        "name": "graded",
        "models": [{"name": name, "model": str(folder)} for name in ("writer", "judge")],
        "nodes": [
            {"name": "draft", "model": "writer", "requests": "q.jsonl", "max_new_tokens": 8},
            {"name": "grade", "model": "judge", "templates": ["{draft}?"], "max_new_tokens": 4},
        ],
        "edges": [{"from": "draft", "to": "grade"}],
    }
    (tmp_path / "app.json").write_text(json.dumps(app))
    (tmp_path / "cluster.json").write_text(dump_json(to_json(CLUSTER)))

    def entry(model: str, node: str, label: str, plan: Plan) -> ScheduledModel:
        replica = ModelReplica(devices=(label,), plan=plan)
        return ScheduledModel(model=model, nodes=(node,), replicas=(replica,))

    stage = [entry("writer", "draft", FIRST, PLAN), entry("judge", "grade", SECOND, SECOND_PLAN)]
    schedule = schedule_on(load_application(tmp_path / "app.json"), CLUSTER, stage)
    write_schedule(tmp_path / "schedule.json", schedule)
    files = ["--cluster", "cluster.json", "--schedule", "schedule.json", "--output"]
    found = {}
    for launcher in ("ray", "local"):
        with contextlib.chdir(tmp_path):
            words = ["run", "app.json", *files, launcher, "--launcher", launcher, "--json"]
            assert main(words) == 0
        assert json.loads(capsys.readouterr().out)["requests"] == {"draft": 6, "grade": 6}
        answers = (tmp_path / launcher / "answers.jsonl").read_text().splitlines()
        found[launcher] = sorted(json.loads(line)["text"] for line in answers)
    assert found["ray"] == found["local"]
