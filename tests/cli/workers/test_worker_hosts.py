"""``llmpq worker`` and ``--workers``: one model over several hosts, and what becomes of losses."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.clocks import PATIENCE_S
from helpers.hosts import TestHost, free_port, two_hosts, wait_for_text
from helpers.processes import is_running, wait_for
from helpers.served_demo import DEMO, HOST, NEW, PLAN, PROMPT, answer_of_one_host, ask, url_of

# Each rank imports torch, and again after each loss.
pytestmark = [pytest.mark.dist, pytest.mark.slow]

ALONE, TOGETHER = "900", "500"
"""Mebibytes: one such host holds the model with its contexts at 16 bits, or two do."""


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The answer of one host."""
    return answer_of_one_host(ALONE, tmp_path_factory.mktemp("cache"))


class Machines:
    """Workers and the host that uses them; the standard error of each is a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = folder / "key"
        self.key.touch(mode=0o600)
        self.key.write_text("a secret of the hosts")
        self.workers: list[str] = []

    def start_worker(self, host: TestHost, *more: str) -> subprocess.Popen[str]:
        """Start a worker and wait until it is ready; its standard error is named by its address."""
        port = str(free_port())
        address = f"{host.address}:{port}"
        words = [HOST, TOGETHER, "worker", "--host", host.address, "--port", port, "--no_measure"]
        words += ["--key_file", str(self.key), *more]
        started = host.start(words, self.folder / address)
        assert started.stdout is not None
        assert started.stdout.readline() == f"ready {address}\n"
        self.workers.append(address)
        return started

    def start_two_workers(self, host: TestHost) -> dict[str, subprocess.Popen[str]]:
        """Start two workers; return them by their addresses, which name their nodes."""
        started = [self.start_worker(host) for _ in range(2)]
        return dict(zip(self.workers, started, strict=True))

    @property
    def there(self) -> Path:
        """The standard error of the only worker."""
        (address,) = self.workers
        return self.folder / address

    def start(self, host: TestHost, verb: str, *words: str) -> subprocess.Popen[str]:
        """Start a verb with all workers."""
        words = (verb, str(DEMO), *PLAN, "--workers", *self.workers, *words)
        own = ["--key_file", str(self.key)] if "--key_file" not in words else []
        return host.start([HOST, TOGETHER, *words, *own], self.folder / "here")


ID = {"llmpq": "id", "openai_batch": "custom_id"}


def line_of(form: str, number: int) -> dict[str, object]:
    """A prompt in llmpq's format, or a request in OpenAI's."""
    if form == "llmpq":
        return {"id": str(number), "prompt": PROMPT, "max_new_tokens": NEW}
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": NEW, "temperature": 0}
    request = {"custom_id": str(number), "method": "POST", "url": "/v1/completions"}
    return request | {"body": body}


def text_of(form: str, answer: dict[str, Any]) -> str:
    if form == "llmpq":
        return answer["text"]
    return answer["response"]["body"]["choices"][0]["text"]


def run_words(*more: str) -> list[str]:
    return ["-p", PROMPT, "--max_tokens", str(NEW), *more]


def children_of(parent: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):  # it has ended
            if f"\nPPid:\t{parent}\n" in status.read_text():
                found.append(int(status.parent.name))
    return [pid for pid in found if is_running(pid)]


@pytest.fixture(params=["loopback", "namespaces"])
def hosts(request: pytest.FixtureRequest) -> Iterator[list[TestHost]]:
    with two_hosts(request.param) as made:
        yield made


def test_two_hosts_answer_as_one_and_a_worker_takes_the_next_job(hosts, tmp_path, expected):
    machines = Machines(tmp_path)
    worker = machines.start_worker(hosts[1])
    other = tmp_path / "other"
    other.touch(mode=0o600)
    other.write_text("another secret of hosts")
    wrong = machines.start(hosts[0], "run", *run_words("--key_file", str(other)))
    assert wrong.wait(PATIENCE_S) == 2
    assert (tmp_path / "here").read_text().count("\n") == 1
    assert "found another key there" in (tmp_path / "here").read_text()
    wait_for_text(machines.there, f"refused {hosts[0].address}: found another key")

    right = machines.start(hosts[0], "run", *run_words("--json"))
    shown, _ = right.communicate(timeout=PATIENCE_S)
    assert right.returncode == 0
    found = json.loads(shown)
    assert found["text"] == expected
    labels = [one["device"] for one in found["devices"]]
    assert labels == ["here/cpu#0", f"{hosts[1].address}/cpu#0"]
    wait_for_text(machines.there, f"{hosts[0].address} has left")
    assert children_of(worker.pid) == []

    stopped = machines.start(hosts[0], "run", *run_words("--max_tokens", "400"))
    assert stopped.stdout is not None
    assert stopped.stdout.read(1)
    stopped.send_signal(signal.SIGINT)  # which ends the answer, as on one host
    assert stopped.wait(PATIENCE_S) == 130
    wait_for_text(machines.there, f"{hosts[0].address} has left", 2)
    assert children_of(worker.pid) == []
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(PATIENCE_S) == 0


def test_a_server_goes_on_without_a_worker_that_is_killed(tmp_path, expected):
    with two_hosts("loopback") as made:
        machines = Machines(tmp_path)
        workers = machines.start_two_workers(made[1])
        server = machines.start(made[0], "serve", "--port", "0", "--step_timeout", "60")
        url = url_of(server)

        def nodes() -> list[str]:
            stages = httpx.get(f"{url}/server_info", timeout=PATIENCE_S).json()["plan"]["stages"]
            return [stage["node"] for stage in stages]

        used = nodes()[1]  # the fastest plan may need one of them, or both
        (other,) = set(workers) - {used}
        assert ask(made[0], url, workers[used].kill) == expected
        assert nodes() == ["here", other]
        wait_for_text(tmp_path / "here", f"worker {used} is lost")
        wait_for_text(tmp_path / "here", f"goes on with here, {other}; planned within")
        server.send_signal(signal.SIGINT)
        assert server.wait(PATIENCE_S) == 0
        wait_for_text(tmp_path / other, "127.0.0.1 has left")
        assert workers[other].poll() is None
        assert children_of(workers[other].pid) == []


def test_an_answer_goes_on_without_a_worker_that_is_killed(tmp_path, expected):
    with two_hosts("loopback") as made:
        machines = Machines(tmp_path)
        workers = machines.start_two_workers(made[1])
        run = machines.start(made[0], "run", *run_words())
        assert run.stdout is not None
        text = run.stdout.read(1)
        plan = (tmp_path / "here").read_text()
        used = next(one for one in workers if f"{one}/cpu#0" in plan)
        workers[used].kill()
        text += run.stdout.read()
        assert text == expected + "\n"
        assert run.wait(PATIENCE_S) == 0
        assert f"worker {used} is lost" in (tmp_path / "here").read_text()


def test_a_cut_wire_is_the_end_where_the_model_does_not_fit_alone(tmp_path):
    with two_hosts("namespaces") as made:
        machines = Machines(tmp_path)
        worker = machines.start_worker(made[1])
        server = machines.start(made[0], "serve", "--port", "0", "--step_timeout", "15")
        url_of(server)
        made[1].set_wire("down")
        assert server.wait(PATIENCE_S) == 3
        errors = (tmp_path / "here").read_text()
        assert f"worker {made[1].address} is lost: gave no sign of life for 15 s" in errors
        assert "no plan without the hosts that were lost" in errors
        wait_for_text(machines.there, f"{made[0].address} is lost: gave no sign of life")
        wait_for(lambda: children_of(worker.pid), lambda found: found == [])
        assert worker.poll() is None


def test_another_folder_is_one_line_and_the_worker_stays(tmp_path):
    other = tmp_path / "model"
    other.mkdir()
    for file in DEMO.iterdir():
        (other / file.name).symlink_to(file)
    config = json.loads((DEMO / "config.json").read_text())
    (other / "config.json").unlink()
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))
    with two_hosts("loopback") as made:
        machines = Machines(tmp_path)
        worker = machines.start_worker(made[1], "--model", str(other))
        run = machines.start(made[0], "run", *run_words())
        assert run.wait(PATIENCE_S) == 2
        last = (tmp_path / "here").read_text().splitlines()[-1]
        assert f"worker 127.0.0.1: {other}: found another model" in last
        wait_for_text(machines.there, "127.0.0.1 has left")
        assert worker.poll() is None


@pytest.mark.parametrize("form", ["llmpq", "openai_batch"])
def test_a_batch_goes_on_without_a_worker_that_is_killed(tmp_path, expected, form):
    requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    lines = [line_of(form, number) for number in range(300)]
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = ["--format", form, "--prompts", str(requests), "--output", str(answers)]
    with two_hosts("loopback") as made:
        machines = Machines(tmp_path)
        workers = machines.start_two_workers(made[1])
        batch = machines.start(made[0], "dist", *files)
        wait_for(lambda: answers.exists() and answers.read_text().count("\n"), lambda n: n > 9)
        assert answers.read_text().count("\n") < len(lines)
        plan = (tmp_path / "here").read_text()
        used = next(one for one in workers if f"{one}/cpu#0" in plan)
        workers[used].kill()
        assert batch.wait(PATIENCE_S) == 0
        assert f"worker {used} is lost" in (tmp_path / "here").read_text()
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    assert sorted(int(one[ID[form]]) for one in found) == list(range(len(lines)))
    assert {text_of(form, one) for one in found} == {expected}
