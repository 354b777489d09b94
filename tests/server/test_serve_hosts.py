"""``llmpq-serve --nnodes``: one server over two hosts, and what ends or loses its ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest
import torch
from helpers.clocks import PATIENCE_S
from helpers.hosts import TestHost, free_port, two_hosts, two_nodes, wait_for_text
from helpers.processes import wait_for, workers_of
from helpers.ranks import make_plan
from helpers.served import DEMO, demo_tokenizer
from transformers import AutoModelForCausalLM

from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.plan import Fleet, FleetMember, write_fleet, write_plan

PROMPT, NEW = "The server listens on", 48

# Each rank imports torch, and again after each loss.
pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def expected() -> str:
    """The greedy answer of transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    ids = torch.tensor([demo_tokenizer().encode(PROMPT)])
    made = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    return demo_tokenizer().decode(made[0, ids.shape[1] :].tolist())


class TwoHosts:
    """A server over two hosts; ``errors`` are the files of their standard error."""

    def __init__(self, hosts: Sequence[TestHost], folder: Path, step_timeout_s: int = 60) -> None:
        self._folder = folder
        self._hosts = hosts
        self.errors = [folder / f"host{number}.txt" for number in range(2)]
        plan = make_plan(
            (0, 6, 12), batch=4, prompt_tokens=64, new_tokens=64, cluster=two_nodes(), source=DEMO
        )
        write_plan(folder / "plan.json", plan)
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text("a secret of the hosts")
        self._words = ["llmpq.cli.commands.serve", "--strat_file_name", str(folder / "plan.json")]
        self._words += ["--token_file", str(token), "--step_timeout", str(step_timeout_s)]
        self._words += ["--nnodes", "2", "--master_addr", hosts[0].address]
        self._words += ["--master_port", str(free_port())]

    def start(self, number: int) -> subprocess.Popen[str]:
        """Start the command on a host."""
        http = ["--port", "0"] * (number == 0)
        words = [*self._words, *http, "--node_rank", str(number)]
        return self._hosts[number].start(words, self.errors[number])

    def ask(self, url: str, at_half: Callable[[], None] = lambda: None) -> str:
        """Return a streamed answer; call ``at_half`` once half of it is here."""
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": NEW, "temperature": 0}

        def stream() -> str:
            texts: list[str] = []
            with httpx.stream(
                "POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=PATIENCE_S
            ) as answer:
                assert answer.status_code == 200
                for line in answer.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    texts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                    if len(texts) == NEW // 2:
                        at_half()
            return "".join(texts)

        return self._hosts[0].call(stream)


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("ready ")
    return line.split()[1]


@pytest.fixture(params=["loopback", "namespaces"])
def hosts(request: pytest.FixtureRequest) -> Iterator[list[TestHost]]:
    with two_hosts(request.param) as made:
        yield made


def test_a_rank_lost_on_either_host_comes_back_and_sigterm_ends_both(hosts, tmp_path, expected):
    both = TwoHosts(hosts, tmp_path)
    there = both.start(1)
    wait_for_text(both.errors[1], "with rank 1, connecting to host 0 (a)")
    here = both.start(0)
    url = url_of(here)
    assert sorted(workers_of(here.pid)) == [0]
    assert sorted(workers_of(there.pid)) == [1]

    def lose(launcher: subprocess.Popen[str]) -> Callable[[], None]:
        return lambda: [os.kill(pid, signal.SIGKILL) for pid in workers_of(launcher.pid).values()]

    assert both.ask(url) == expected
    assert both.ask(url, lose(there)) == expected
    wait_for_text(both.errors[0], "starting all ranks anew (1 of 3)")
    assert both.ask(url, lose(here)) == expected
    wait_for_text(both.errors[1], "starting all ranks anew (2 of 3)")
    here.send_signal(signal.SIGTERM)
    assert here.wait(PATIENCE_S) == 0
    assert there.wait(PATIENCE_S) == 0
    assert "host 1 of 2 (b): done" in both.errors[1].read_text(encoding="utf-8")


def test_a_host_that_is_stopped_may_come_back(tmp_path, expected):
    with two_hosts("loopback") as made:
        both = TwoHosts(made, tmp_path)
        here, there = both.start(0), both.start(1)
        url = url_of(here)
        there.send_signal(signal.SIGINT)
        assert there.wait(PATIENCE_S) == 130
        wait_for_text(both.errors[0], "starting all ranks anew (1 of 3)")
        assert httpx.get(f"{url}/health").status_code == 503
        again = both.start(1)
        assert both.ask(url) == expected
        here.kill()  # its ranks end with it, and the other host waits for it
        wait_for_text(both.errors[1], "starting all ranks anew (1 of 3)")
        url = url_of(both.start(0))
        assert both.ask(url) == expected
        assert again.poll() is None


def test_a_cut_wire_is_a_lost_rank(tmp_path, expected):
    with two_hosts("namespaces") as made:
        both = TwoHosts(made, tmp_path, step_timeout_s=15)
        here, there = both.start(0), both.start(1)
        url = url_of(here)

        def cut() -> None:
            made[1].set_wire("down")
            wait_for_text(both.errors[0], "starting all ranks anew (1 of 3)")
            wait_for_text(both.errors[1], "starting all ranks anew (1 of 3)")
            made[1].set_wire("up")

        assert both.ask(url, cut) == expected
        here.send_signal(signal.SIGTERM)
        assert here.wait(PATIENCE_S) == 0
        assert there.wait(PATIENCE_S) == 0


def test_a_fleet_over_two_hosts_is_one_server(tmp_path, expected):
    group = DeviceGroup(type="cpu", count=2, threads=1)
    cluster = Cluster(name="c", nodes=tuple(Node(name=n, devices=(group,)) for n in ("a", "b")))
    sizes = {"batch": 4, "prompt_tokens": 64, "new_tokens": 64, "source": DEMO}
    alone = Cluster(name="b", nodes=(two_nodes().nodes[1],))
    write_plan(tmp_path / "both.json", make_plan((0, 6, 12), cluster=two_nodes(), **sizes))
    write_plan(tmp_path / "own.json", make_plan((0, 12), cluster=alone, **sizes))
    labels = {"both.json": ("a/cpu#0", "b/cpu#0"), "own.json": ("b/cpu#1",)}
    members = tuple(
        FleetMember(strategy=name, devices=devices, requests_per_s=1)
        for name, devices in labels.items()
    )
    fleet = Fleet(
        model="tiny", replicas=members, requests_per_s=2, bound=2, status="optimal", cluster=cluster
    )
    write_fleet(tmp_path / "fleet.json", fleet)
    words = ["llmpq.cli.commands.serve", "--fleet", str(tmp_path / "fleet.json")]
    words += ["--node_addr", "a=127.0.0.1", "b=127.0.0.2", "--balancer", "round_robin"]
    words += ["--port", str(free_port()), "--master_port", str(free_port())]
    words += ["--step_timeout", "60"]
    with two_hosts("loopback") as made:
        there = made[1].start([*words, "--node", "b"], tmp_path / "b.txt")
        here = made[0].start([*words, "--node", "a"], tmp_path / "a.txt")
        url = url_of(here)
        wait_for_text(tmp_path / "b.txt", "replica 1: ready http://127.0.0.2:")
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": NEW, "temperature": 0}

        def answered() -> list[str]:
            text = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
            pattern = r'router_requests_total\{outcome="answered".*\} (.*)'
            return [count for count in re.findall(pattern, text) if float(count)]

        def ask() -> list[str]:
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).json()
            assert answer["choices"][0]["text"] == expected
            return answered()

        wait_for(ask, lambda counts: len(counts) == 2)
        for host in (here, there):
            host.send_signal(signal.SIGTERM)
        assert [host.wait(PATIENCE_S) for host in (here, there)] == [0, 0]


def test_other_options_on_another_host_are_an_error(tmp_path):
    with two_hosts("loopback") as made:
        both = TwoHosts(made, tmp_path)
        here = both.start(0)
        both._words += ["--token_budget", "100"]
        there = both.start(1)
        assert [one.wait(PATIENCE_S) for one in (here, there)] == [2, 2]
        for file in both.errors:
            wait_for(lambda file=file: file.read_text(), lambda text: "other options" in text)
