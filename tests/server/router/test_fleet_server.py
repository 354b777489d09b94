"""llmpq-serve --fleet: replicas as processes behind a router."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from dataclasses import replace

import httpx
import pytest
from helpers.clocks import PATIENCE_S

pytest.importorskip("aiohttp")

from helpers.processes import is_running, wait_for
from helpers.served import DEMO

from llmpq import plan
from llmpq.cli.commands import serve
from llmpq.cli.commands.serve import main, replica_options
from llmpq.dist.launch.process_environment import visible_devices
from llmpq.errors import SpecError
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.plan import Fleet, FleetMember, write_fleet

REPLICA = """
import http.server, json, signal, sys
LOAD = dict(is_ready=True, prefill_step_s=1, decode_step_s=1, kv_tokens=64, token_budget=64)
ZERO = ("queued_tokens", "waiting_tokens", "free_kv_tokens", "running", "waiting", "answers",
        "new_tokens")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = LOAD | dict.fromkeys((*ZERO, "prompt_tokens"), 0)
        text = json.dumps(body if self.path == "/load" else {"name": sys.argv[1]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
def end(*_):
    sys.stderr.write(f"ended {sys.argv[1]}\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
for path in sys.argv[2:]:
    open(path, "w").close()
print(f"ready http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
"""
FAILS = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
sys.exit(3)
"""
LOADS = """
import os, sys, time
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""
PARENT = """
import sys
from llmpq.routing import load_balancer
from llmpq.options.server import ListenOptions
from llmpq.server.router.fleet import ReplicaCommand, run_fleet
commands = [ReplicaCommand(words=[sys.executable, "-c", *pair]) for pair in {pairs!r}]
run_fleet(
    ListenOptions(host="127.0.0.1", port=0), commands, load_balancer("round_robin"), 0.1,
    lambda url, urls: print("ready", url, *urls, flush=True),
)
"""


def started(*pairs: tuple[str, ...]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PARENT.format(pairs=pairs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_replicas_start_answer_in_turn_and_end_with_the_router():
    with started((REPLICA, "one"), (REPLICA, "two")) as process:
        try:
            assert process.stdout is not None
            word, url, *replicas = process.stdout.readline().split()
            assert word == "ready"
            assert len(replicas) == 2
            names = {
                httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).json()["name"] for _ in range(2)
            }
            assert names == {"one", "two"}
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0
    # A thread of a replica may be writing that its client has gone.
    for number, name in enumerate(("one", "two")):
        own = [line for line in errors.splitlines() if line.startswith(f"replica {number}: ")]
        assert any(f"ended {name}" in line for line in own), errors
    for address in replicas:
        with pytest.raises(httpx.ConnectError):
            httpx.get(address)


def test_a_replica_of_another_host_gets_requests_once_it_answers():
    with started((REPLICA, "there")) as other:
        try:
            assert other.stdout is not None
            _, _, there = other.stdout.readline().split()
            here = PARENT.format(pairs=[(REPLICA, "here")]).replace(
                "run_fleet(\n",
                f"commands += [ReplicaCommand(words=(), address={there!r})]\nrun_fleet(\n",
            )
            with subprocess.Popen(
                [sys.executable, "-c", here], stdout=subprocess.PIPE, text=True
            ) as process:
                try:
                    assert process.stdout is not None
                    _, url, *replicas = process.stdout.readline().split()
                    assert replicas[1] == there
                    names = {
                        httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).json()["name"]
                        for _ in range(2)
                    }
                    assert names == {"here", "there"}
                    process.send_signal(signal.SIGTERM)
                    assert process.wait(PATIENCE_S) == 0
                finally:
                    process.kill()
            assert httpx.get(f"{there}/v1/models").json()["name"] == "there"
        finally:
            other.kill()


HOST = """
import sys
from llmpq.server.router.fleet import ReplicaCommand, run_replicas
commands = [ReplicaCommand(words=(), address="http://a:1")]
commands += [ReplicaCommand(words=[sys.executable, "-c", *pair]) for pair in {pairs!r}]
run_replicas(commands, 5.0)
"""


def test_a_host_without_the_router_ends_its_replicas_with_sigterm(tmp_path):
    ready = tmp_path / "ready"
    pairs = [(REPLICA, "one", str(ready))]
    with subprocess.Popen(
        [sys.executable, "-c", HOST.format(pairs=pairs)], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            wait_for(ready.exists, bool)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0
    assert errors.splitlines() == ["replica 1: ended one"]


@pytest.mark.parametrize(("status", "expected"), [(0, 0), (3, 1)])
def test_a_host_without_the_router_ends_with_its_replicas(status, expected):
    pairs = [(f"raise SystemExit({status})",)]
    done = subprocess.run(
        [sys.executable, "-c", HOST.format(pairs=pairs)],
        stderr=subprocess.PIPE, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == expected
    assert ("all replicas have ended, with status 3" in done.stderr) == bool(status)


def test_a_replica_that_does_not_start_ends_the_others(tmp_path):
    ready = str(tmp_path / "ready")
    with started((REPLICA, "one", ready), (FAILS, ready)) as process:
        out, errors = process.communicate(timeout=PATIENCE_S)
    assert "ready" not in out
    assert "replica 1 ended with status 3 before it was ready" in errors
    assert "replica 0: ended one" in errors


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends them")
def test_replicas_end_when_the_command_is_killed_even_while_they_load(tmp_path):
    files = [tmp_path / "one", tmp_path / "two"]
    with started(*((LOADS, str(file)) for file in files)) as process:
        try:
            wait_for(lambda: [file.exists() for file in files], all)
        finally:
            process.kill()
    pids = [int(file.read_text()) for file in files]
    wait_for(lambda: [pid for pid in pids if is_running(pid)], lambda left: not left)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fleet", "missing.json"], "missing.json: no such file"),
        (["--fleet", "a", "--strat_file_name", "b"], "not allowed with argument"),
        (["--strat_file_name", "b", "--balancer", "sal"], "--balancer: found without --fleet"),
        (["--strat_file_name", "b", "--node", "a"], "--node: found without --fleet"),
        (["--strat_file_name", "b", "--node_addr", "a=b"], "--node_addr: found without --fleet"),
    ],
)
def test_options_that_cannot_be_used_are_errors(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.dist
@pytest.mark.slow
def test_two_real_replicas_answer_as_one_server(tmp_path):
    made = plan(
        str(DEMO), device_names=["cpu"], device_numbers=[1], batch=4, prompt=64, new=32,
        dtype="float32", bits=(16,),
    )  # fmt: skip
    made.save(tmp_path / "one.json")
    (group,) = made.cluster.nodes[0].devices
    node = replace(made.cluster.nodes[0], devices=(replace(group, count=2),))
    cluster = replace(made.cluster, nodes=(node,))
    members = tuple(
        FleetMember(strategy="one.json", devices=(device.label,), requests_per_s=1)
        for device in cluster.devices
    )
    fleet = Fleet(
        model=made.model.name, replicas=members, requests_per_s=2, bound=2, status="optimal",
        cluster=cluster,
    )  # fmt: skip
    write_fleet(tmp_path / "fleet.json", fleet)
    command = [sys.executable, "-m", "llmpq.cli.commands.serve", "--port", "0"]
    command += ["--fleet", str(tmp_path / "fleet.json"), "--balancer", "round_robin"]
    command += ["--served_model_name", "demo", "--step_timeout", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[1]
            body = {"model": "demo", "prompt": "The", "max_tokens": 4, "temperature": 0}
            texts = {
                httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).json()[
                    "choices"
                ][0]["text"]
                for _ in range(2)
            }
            assert len(texts) == 1
            found = re.findall(
                r'router_requests_total\{outcome="answered".*\} (.*)',
                httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text,
            )
            assert found == ["1.0", "1.0"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def gpu_fleet(*nodes: str) -> Fleet:
    cluster = Cluster(
        name="box",
        nodes=tuple(
            Node(name=name, devices=(DeviceGroup(type="T4-16G", count=3),)) for name in nodes
        ),
    )
    member = FleetMember(strategy="a.json", devices=("n/T4-16G#0", "n/T4-16G#2"), requests_per_s=1)
    return Fleet(
        model="m", replicas=(member,), requests_per_s=1, bound=1, status="optimal", cluster=cluster
    )


def test_a_replica_sees_its_own_accelerators():
    fleet = gpu_fleet("n")
    one = fleet.replicas[0]
    assert visible_devices(fleet.cluster, one.devices, {}) == {"CUDA_VISIBLE_DEVICES": "0,2"}
    shown = {"CUDA_VISIBLE_DEVICES": "5,6,7"}
    assert visible_devices(fleet.cluster, one.devices, shown) == {"CUDA_VISIBLE_DEVICES": "5,7"}
    with pytest.raises(SpecError, match="CUDA_VISIBLE_DEVICES: found 5,6, expected the 3 devices"):
        visible_devices(fleet.cluster, one.devices, {"CUDA_VISIBLE_DEVICES": "5,6"})
    with pytest.raises(SpecError, match="found accelerators on n, other, expected one node"):
        visible_devices(gpu_fleet("n", "other").cluster, one.devices, {})


def test_replicas_get_the_options_that_are_not_the_routers():
    words = ["--fleet", "f.json", "--port=80", "--host", "0.0.0.0", "--alpha", "2", "--json"]
    words += ["--node", "a", "--node_addr", "a=10.0.0.1", "b=10.0.0.2", "--master_port", "7"]
    words += ["--balance", "round_robin", "--no_pref", "--kernel=-x", "--token_file", "t"]
    left = ["--alpha", "2", "--no_prefix_caching", "--kernel=-x", "--token_file", "t"]
    assert replica_options(serve._parser().parse_args(words)) == left


def test_a_host_sees_its_own_accelerators_of_a_replica_over_several():
    fleet = gpu_fleet("m", "n")
    labels = ("m/T4-16G#1", "n/T4-16G#0", "n/T4-16G#2")
    assert visible_devices(fleet.cluster, labels, {}, "n") == {"CUDA_VISIBLE_DEVICES": "0,2"}
    assert visible_devices(fleet.cluster, labels, {}, "m") == {"CUDA_VISIBLE_DEVICES": "1"}
