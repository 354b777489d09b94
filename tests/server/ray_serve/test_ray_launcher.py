"""llmpq-dist --launcher ray: its options, and runs on a Ray cluster of two nodes of this host."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.processes import is_running, wait_for
from helpers.ranks import make_plan

from llmpq.cli.commands import dist
from llmpq.dist.io.prompts import Prompt, write_prompts
from llmpq.dist.io.results import read_results
from llmpq.dist.launch.signals import StopRequest
from llmpq.errors import CapacityError, SpecError
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.devices.figures import DeviceEntry
from llmpq.spec.plan import Plan, write_plan

HAS_RAY = importlib.util.find_spec("ray") is not None
TYPES = ("cpu-a", "cpu-b")
NUM_PROMPTS = 6
MANY_PROMPTS = 120


def two_nodes(types: tuple[str, str] = TYPES) -> Plan:
    nodes = tuple(
        Node(name=f"node{n}", devices=(DeviceGroup(type=name, count=1, threads=1),))
        for n, name in enumerate(types)
    )
    entries = tuple(DeviceEntry(type=name, like="cpu") for name in dict.fromkeys(types))
    cluster = Cluster(name="two", nodes=nodes, device_types=entries)
    return make_plan((0, 1, 3), prefill=2, decode=2, new_tokens=100, cluster=cluster)


def write_files(
    folder: Path, plan: Plan, model_dir: Path, num_prompts: int = NUM_PROMPTS, new_tokens: int = 8
) -> list[str]:
    write_plan(folder / "strategy.json", plan)
    prompts = [
        Prompt(
            id=n, where="", token_ids=(1 + n % 40, 2, 3), max_new_tokens=new_tokens, ignore_eos=True
        )
        for n in range(num_prompts)
    ]
    write_prompts(folder / "prompts.jsonl", prompts)
    return [
        "--strat_file_name", str(folder / "strategy.json"), "--model", str(model_dir),
        "--prompts", str(folder / "prompts.jsonl"), "--output", str(folder / "results.jsonl"),
        "--step_timeout", "60", "--store", "off",
    ]  # fmt: skip


def answers(folder: Path) -> dict[str | int, tuple[int, ...]]:
    return {one.id: one.token_ids for one in read_results(folder / "results.jsonl")}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes", "2"], "--nnodes: found with --launcher ray"),
        (["--node_rank", "1"], "--node_rank: found with --launcher ray"),
        (["--master_port", "1"], "--master_port: found with --launcher ray"),
        (["--token_file", "x"], "--token_file: found with --launcher ray"),
        (["--no_auto"], "--no_auto: found with --launcher ray"),
        (["--launcher", "local", "--ray_address", "x"], "--ray_address: found without --launcher"),
    ],
)
def test_options_that_do_not_go_together_are_errors(words, message, tmp_path, capsys):
    files = write_files(tmp_path, two_nodes(), tmp_path)
    assert dist.main([*files, "--launcher", "ray", *words]) == SpecError.exit_status
    assert message in capsys.readouterr().err


@pytest.mark.skipif(HAS_RAY, reason="for environments without Ray")
def test_without_ray_the_missing_package_is_named(tmp_path, capsys):
    files = write_files(tmp_path, two_nodes(), tmp_path)
    assert dist.main([*files, "--launcher", "ray"]) == SpecError.exit_status
    assert "install llmpq[ray]" in capsys.readouterr().err


on_a_cluster = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.usefixtures("address"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    if not HAS_RAY:
        pytest.skip("needs llmpq[ray]")
    from helpers.ray_fleet import cluster  # noqa: PLC0415  before Ray: sets its environment

    with cluster(TYPES) as found:
        yield found


class TestOnACluster:
    pytestmark = on_a_cluster

    def test_answers_are_those_without_ray(self, tiny_model, tmp_path, capfd):
        model_dir = tiny_model("llama", seed=1)
        files = write_files(tmp_path, two_nodes(), model_dir)
        assert dist.main([*files, "--launcher", "ray", "--json"]) == 0
        report = json.loads(capfd.readouterr().out)
        assert report["generated_tokens"] == NUM_PROMPTS * 8
        assert len(report["stages"]) == 2
        found = answers(tmp_path)
        (tmp_path / "results.jsonl").unlink()
        alone = write_files(tmp_path, make_plan((0, 3), new_tokens=100), model_dir)
        assert dist.main(alone) == 0
        assert found == answers(tmp_path)

    @pytest.mark.parametrize("types", [TYPES, TYPES[::-1]])
    def test_each_host_is_on_the_node_with_its_devices(self, types):
        import ray  # noqa: PLC0415
        from ray.util.placement_group import placement_group_table  # noqa: PLC0415

        from llmpq.server.ray import launcher as ray_launcher  # noqa: PLC0415

        labels = {node["NodeID"]: node["Labels"]["llmpq-device"] for node in ray.nodes()}
        wanted = ray_launcher.ray_hosts(two_nodes(types))
        with ray_launcher._placed(wanted, StopRequest(), 30.0) as group:
            places = placement_group_table(group)["bundles_to_node_id"]
        assert [labels[places[number]] for number in range(2)] == list(types)

    @pytest.mark.parametrize(
        ("types", "error", "message"),
        [
            (
                ("cpu-a", "cpu-c"),
                CapacityError,
                r"found the nodes .*llmpq-device=cpu-b with 2 CPU.*llmpq-device=cpu-c with 1 CPU",
            ),
            (("cpu-a", "cpu-a"), CapacityError, "llmpq-device=cpu-a with 1 CPU, llmpq-device="),
            (("cpu-a", "cpu b"), SpecError, "cluster: device types: .*cpu b"),
        ],
    )
    def test_nodes_that_are_missing_are_named(self, types, error, message):
        from llmpq.server.ray.launcher import run_on_ray  # noqa: PLC0415

        with pytest.raises(error, match=message):
            run_on_ray(two_nodes(types), [], StopRequest(), place_timeout_s=1.0)

    def test_the_error_of_a_host_is_shown_with_its_node(self, tmp_path, capfd):
        files = write_files(tmp_path, two_nodes(), tmp_path / "missing")
        assert dist.main([*files, "--launcher", "ray"]) == SpecError.exit_status
        errors = capfd.readouterr().err
        assert "node0: llmpq-dist: error:" in errors
        assert "missing" in errors

    def test_a_rank_that_is_killed_ends_the_run(self, address, tiny_model, tmp_path):
        with running(tmp_path, tiny_model("llama", seed=1), address) as process:
            os.kill(ranks()[1], signal.SIGKILL)
            errors = process.communicate()[1]
        assert process.returncode == 4
        assert "node1: llmpq-dist: error: stage 1" in errors
        assert "SIGKILL" in errors
        assert not ranks()

    def test_ranks_end_when_the_command_is_killed(self, address, tiny_model, tmp_path):
        with running(tmp_path, tiny_model("llama", seed=1), address) as process:
            own = ranks()
            assert len(own) == 2
            process.kill()
            wait_for(lambda: [pid for pid in own.values() if is_running(pid)], [].__eq__)
        assert len(answers(tmp_path)) < MANY_PROMPTS

    def test_sigterm_drains(self, address, tiny_model, tmp_path):
        with running(tmp_path, tiny_model("llama", seed=1), address) as process:
            process.send_signal(signal.SIGTERM)
            errors = process.communicate()[1]
        assert process.returncode == 130, errors
        assert "finishing what has begun" in errors
        assert "--resume" in errors
        assert 0 < len(answers(tmp_path)) < MANY_PROMPTS
        assert not ranks()


@contextlib.contextmanager
def running(folder: Path, model_dir: Path, address: str) -> Iterator[subprocess.Popen[str]]:
    """Run the command in a process of its own; yields when it makes tokens."""
    health = folder / "health.json"
    plan = two_nodes()
    files = write_files(folder, plan, model_dir, MANY_PROMPTS, new_tokens=100)
    words = ["--launcher", "ray", "--ray_address", address, "--health", str(health)]
    words += ["--max_restarts", "0"]
    with subprocess.Popen(
        [sys.executable, "-m", "llmpq.cli.commands.dist", *files, *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            wait_for(lambda: state_of(process, health), {"serving", "ended"}.__contains__)
            yield process
        finally:
            process.kill()


def state_of(process: subprocess.Popen[str], health: Path) -> str:
    if process.poll() is not None:
        return "ended"
    return json.loads(health.read_text())["state"] if health.exists() else ""


def ranks() -> dict[int, int]:
    """Process ids of the ranks below this process, by rank."""
    from helpers.ray_fleet import children_of  # noqa: PLC0415  imports Ray

    found = {}
    for pid in children_of(os.getpid()):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"llmpq.dist.launch.worker" in words:
                found[int(words[-3])] = pid
    return found
