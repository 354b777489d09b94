"""``--launcher ray``: one model over the nodes of a Ray cluster on this host, and lost nodes."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from helpers.clocks import PATIENCE_S
from helpers.hosts import TestHost, free_port, wait_for_text
from helpers.processes import is_running, wait_for
from helpers.served_demo import DEMO, NEW, PLAN, PROMPT, answer_of_one_host, ask, url_of

from llmpq.cli.front import run
from llmpq.errors import SpecError
from llmpq.units import MIB

HAS_RAY = importlib.util.find_spec("ray") is not None
if HAS_RAY:
    from helpers.ray_fleet import children_of, cluster_of  # before Ray: sets its environment
MODEL = [str(DEMO), "--launcher", "ray"]


def error_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the only line of a command that ends with status 2."""
    assert run.main(words) == SpecError.exit_status
    found = capsys.readouterr().err
    assert found.count("\n") == 1
    return found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--launcher", "ray", "--workers", "b", "--key_file", "x"],
            "--workers: found with --launcher ray, expected one of them",
        ),
        (["--launcher", "ray", "--key_file", "x"], "--key_file: found without --workers"),
        (["--ray_address", "x:1"], "--ray_address: found without --launcher ray"),
        (["--replan_timeout", "0"], "--replan_timeout: found 0, expected more than 0"),
    ],
)
def test_options_that_do_not_go_together_are_errors(words, message, capsys):
    assert message in error_of([str(DEMO), "-p", PROMPT, *words], capsys)


@pytest.mark.skipif(HAS_RAY, reason="for environments without Ray")
def test_without_ray_the_missing_package_is_named(capsys):
    assert "install llmpq[ray]" in error_of([*MODEL, "-p", PROMPT], capsys)


@pytest.mark.ray
@pytest.mark.skipif(not HAS_RAY, reason="needs llmpq[ray]")
def test_no_cluster_is_one_error(capsys, monkeypatch):
    address = f"127.0.0.1:{free_port()}"
    words = [*MODEL, "-p", PROMPT]
    expected = f"--ray_address: found no Ray cluster at {address}, expected one that 'ray start'"
    assert expected in error_of([*words, "--ray_address", address], capsys)
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert expected in error_of(words, capsys)


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Iterator[TestHost]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    host = TestHost(address="127.0.0.1")
    try:
        yield host
    finally:
        for process in host.processes:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The answer of one host."""
    return answer_of_one_host("900", tmp_path_factory.mktemp("cache"))


class Nodes:
    """Nodes of Ray on this host; commands run on the first one."""

    def __init__(self, cluster, folder: Path, here: TestHost) -> None:
        self._cluster = cluster
        self._here = here
        self.errors = folder / "errors"

    def start(self, verb: str, *words: str) -> subprocess.Popen[str]:
        """Start a verb; its standard error is a file."""
        words = ("llmpq.cli.front.program", verb, *MODEL, *PLAN, *words)
        return self._here.start([*words, "--ray_address", self._cluster.address], self.errors)

    def serve(self, *words: str) -> tuple[subprocess.Popen[str], str]:
        """Start a server; return it and its address once it is ready."""
        server = self.start("serve", "--port", "0", "--step_timeout", "60", *words)
        return server, url_of(server)

    @property
    def ids(self) -> dict[str, str]:
        """Ray's ids of the nodes by their names in plans."""
        import ray  # noqa: PLC0415

        here = self._cluster.head_node.node_id
        return {
            "here" if one["NodeID"] == here else f"127.0.0.1:{one['NodeManagerPort']}": one[
                "NodeID"
            ]
            for one in ray.nodes()
        }

    def raylet(self, name: str) -> int:
        """Return the process of a node's raylet."""
        node = next(one for one in self._nodes() if one.node_id == self.ids[name])
        return int(node.all_processes["raylet"][0].process.pid)

    def kill(self, name: str) -> None:
        """Kill all processes of a node, parents first, as the loss of a host does."""
        started = sorted(children_of(self.raylet(name)))
        next(one for one in self._nodes() if one.node_id == self.ids[name]).kill_raylet()
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _nodes(self) -> list:
        return [self._cluster.head_node, *self._cluster.worker_nodes]


@pytest.fixture
def nodes(request, tmp_path, here) -> Iterator[Nodes]:
    """Nodes with so many CPUs, and 500 MiB for each."""
    settings = [{"num_cpus": cpus, "memory": 500 * MIB} for cpus in request.param]
    with cluster_of(settings) as cluster:
        yield Nodes(cluster, tmp_path, here)


def node_of_ranks(raylets: dict[str, int]) -> dict[int, str]:
    """Return below which node's raylet the process of each rank runs."""
    found = {}
    for name, raylet in raylets.items():
        for pid in children_of(raylet):
            words = command_of(pid)
            if b"llmpq.dist.launch.worker" in words:
                found[int(words[-3])] = name
    return found


def command_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return []


def places() -> list[list[str]]:
    """Return the nodes of the bundles of each placement group that Ray holds."""
    from ray.util.placement_group import placement_group_table  # noqa: PLC0415

    groups = [one for one in placement_group_table().values() if one["state"] == "CREATED"]
    return [[one["bundles_to_node_id"][n] for n in range(len(one["bundles"]))] for one in groups]


def nodes_of_plan(url: str) -> list[str]:
    stages = httpx.get(f"{url}/server_info", timeout=PATIENCE_S).json()["plan"]["stages"]
    return [stage["node"] for stage in stages]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="needs llmpq[ray]")
@pytest.mark.filterwarnings("ignore")  # Ray's own
class TestOnACluster:
    @pytest.mark.parametrize("nodes", [(1, 2)], indirect=True)
    def test_two_nodes_answer_as_one_host_and_ranks_are_where_the_plan_says(self, nodes, expected):
        run = nodes.start("run", "-p", PROMPT, "--max_tokens", str(NEW), "--json")
        shown, _ = run.communicate(timeout=PATIENCE_S)
        assert run.returncode == 0
        found = json.loads(shown)
        assert found["text"] == expected
        (other,) = nodes.ids.keys() - {"here"}
        devices = [
            (one["device"], one["threads"], one["capacity_bytes"]) for one in found["devices"]
        ]
        room = 500 * MIB
        assert devices == [("here/cpu#0", 1, room), (f"{other}/cpu#0", 2, room)]
        wait_for(places, [].__eq__)

        server, url = nodes.serve()
        assert ask(TestHost(address="127.0.0.1"), url) == expected
        named = nodes_of_plan(url)
        assert named == ["here", other]
        assert places() == [[nodes.ids[name] for name in named]]
        assert node_of_ranks({other: nodes.raylet(other)}) == {1: other}
        server.send_signal(signal.SIGINT)
        assert server.wait(PATIENCE_S) == 0
        wait_for(places, [].__eq__)
        wait_for(lambda: node_of_ranks({other: nodes.raylet(other)}), {}.__eq__)

    @pytest.mark.parametrize("nodes", [(1, 1, 1)], indirect=True)
    def test_a_server_goes_on_without_a_node_that_is_killed(self, nodes, expected):
        server, url = nodes.serve()
        used = nodes_of_plan(url)[1]  # the fastest plan may need one of them, or both
        (other,) = nodes.ids.keys() - {"here", used}
        client = TestHost(address="127.0.0.1")
        assert ask(client, url, lambda: nodes.kill(used)) == expected
        # The answer may have been complete before the loss was noticed.
        wait_for(lambda: nodes_of_plan(url), ["here", other].__eq__)
        assert ask(client, url) == expected
        wait_for(places, [[nodes.ids[name] for name in ("here", other)]].__eq__)
        wait_for_text(nodes.errors, f"node {used} is lost")
        wait_for_text(nodes.errors, f"goes on with here, {other}; planned within")
        assert node_of_ranks({other: nodes.raylet(other)}) == {1: other}
        server.kill()
        wait_for(lambda: node_of_ranks({other: nodes.raylet(other)}), lambda found: not found)
        assert is_running(nodes.raylet(other))

    @pytest.mark.parametrize("nodes", [(1, 1, 1)], indirect=True)
    def test_a_file_of_prompts_is_answered_without_a_node_that_is_killed(
        self, nodes, tmp_path, expected
    ):
        prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
        lines = [{"id": str(n), "prompt": PROMPT, "max_new_tokens": NEW} for n in range(300)]
        prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
        batch = nodes.start("dist", "--prompts", str(prompts), "--output", str(answers))
        wait_for(lambda: answers.exists() and answers.read_text().count("\n"), lambda n: n > 9)
        assert answers.read_text().count("\n") < len(lines)
        plan = nodes.errors.read_text()
        used = next(one for one in nodes.ids if one != "here" and f"{one}/cpu#0" in plan)
        nodes.kill(used)
        assert batch.wait(PATIENCE_S) == 0
        wait_for_text(nodes.errors, f"node {used} is lost")
        found = [json.loads(line) for line in answers.read_text().splitlines()]
        assert sorted(int(one["id"]) for one in found) == list(range(len(lines)))
        assert {one["text"] for one in found} == {expected}
        wait_for(places, [].__eq__)

    @pytest.mark.parametrize("nodes", [(1, 1)], indirect=True)
    def test_a_lost_node_is_the_end_where_the_model_does_not_fit_without_it(self, nodes):
        server, url = nodes.serve()
        (other,) = nodes.ids.keys() - {"here"}
        assert nodes_of_plan(url) == ["here", other]
        nodes.kill(other)
        output = server.communicate(timeout=PATIENCE_S)[0]
        assert server.returncode == 3
        assert output == ""  # nothing of Ray's on the way out
        lines = nodes.errors.read_text().splitlines()
        assert sum(": error: " in line for line in lines) == 1
        assert "error: no plan without the hosts that were lost: demo does not fit" in lines[-1]

    @pytest.mark.parametrize("nodes", [(0, 1)], indirect=True)
    def test_a_node_without_cpus_cannot_run_the_command(self, nodes):
        started = nodes.start("run", "-p", PROMPT)
        assert started.wait(PATIENCE_S) == SpecError.exit_status
        last = nodes.errors.read_text().splitlines()[-1]
        assert "--launcher ray: found 0 CPUs and 0 GPUs of this host to plan for" in last
