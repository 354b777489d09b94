"""When ranks are started anew and when not, and what becomes of a run that is asked to end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.clocks import PATIENCE_S
from helpers.ranks import make_plan

from llmpq.dist.io.job import Job
from llmpq.dist.launch import ranks as module
from llmpq.dist.launch.ranks import Hosts, Ranks
from llmpq.dist.launch.signals import StopRequest, drain_file
from llmpq.dist.metrics.measurement import Measurement
from llmpq.dist.metrics.progress import Event
from llmpq.errors import CapacityError, InfeasibleError, SpecError, StageError, StoppedError
from llmpq.options.run import FaultOptions
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.plan import Plan, read_plan

PLAN = make_plan((0, 1, 3))
CPU = DeviceGroup(type="test_cpu", count=1)
CLUSTER = Cluster(
    name="two", nodes=(Node(name="a", devices=(CPU,)), Node(name="b", devices=(CPU,)))
)
SECOND_HOST = {
    "plan": make_plan((0, 1, 3), cluster=CLUSTER),
    "hosts": Hosts(num_nodes=2, node_rank=1, address=("127.0.0.1", 1)),
}
DONE = Measurement(requests=1, generated_tokens=1, latency_s=1.0, load_s=1.0, stages=())


class Generations:
    """Stands for ``launch``: plays one generation after the other."""

    def __init__(self, *plays: Callable[[Job, Path, Ranks], None]) -> None:
        self.jobs: list[Job] = []
        self._plays = list(plays)

    def __call__(self, job, _, __, folder, monitor, ___):
        self.jobs.append(job)
        (folder / "job.json").touch()
        self._plays.pop(0)(job, folder, monitor)
        return DONE


def dies(tokens: int = 0, answers: int = 0, error: Exception | None = None):
    def play(job: Job, folder: Path, monitor: Ranks) -> None:
        monitor.report(Event(rank=0, kind="tokens", done=tokens, total=9))
        with job.output.open("a") as file:
            for number in range(answers):
                line = {"id": number, "token_ids": [1], "text": "", "finish_reason": "length"}
                file.write(json.dumps(line) + "\n")
        (folder / "rendezvous").touch()
        raise error or StageError("stage 1: was ended by SIGKILL")

    return play


def ends(job: Job, folder: Path, monitor: Ranks) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["job.json"]


class Run:
    """Ranks with their job."""

    def __init__(self, ranks: Ranks, job: Job) -> None:
        self._ranks, self._job = ranks, job

    def run(self) -> Measurement | None:
        with self._ranks:
            return self._ranks.run(self._job)


def supervise(tmp_path, monkeypatch, *plays, plan=PLAN, hosts=None, stop=None, **options):
    task = options.pop("task", "generate")
    generations = Generations(*plays)
    monkeypatch.setattr(module, "launch", generations)
    paths = {name: tmp_path / name for name in ("strategy", "model_dir", "prompts", "output")}
    ranks = Ranks(plan, FaultOptions(**options), hosts=hosts, stop=stop)
    return generations, Run(ranks, Job(**paths, task=task))


def test_a_lost_rank_is_made_up_for_by_a_new_start(tmp_path, monkeypatch, caplog):
    generations, run = supervise(
        tmp_path, monkeypatch, dies(5, answers=2), dies(7), ends, max_restarts=2
    )
    measurement = run.run()
    assert [job.resume for job in generations.jobs] == [False, True, True]
    assert [one.finished for one in measurement.restarts] == [2, 0]
    assert measurement.restarts[0].cause == "stage 1: was ended by SIGKILL"
    assert caplog.text.count("starting all ranks anew") == 2


@pytest.mark.parametrize("limit", [1, 3])
def test_restarts_are_bounded(tmp_path, monkeypatch, limit):
    generations, run = supervise(
        tmp_path, monkeypatch, *[dies(5)] * (limit + 1), max_restarts=limit
    )
    with pytest.raises(
        StageError, match=rf"stage 1: was .* anew {limit} of {limit} times, no more"
    ):
        run.run()
    assert len(generations.jobs) == limit + 1


def test_two_starts_without_a_token_are_enough(tmp_path, monkeypatch):
    _, run = supervise(tmp_path, monkeypatch, dies(5), dies(0), dies(0), max_restarts=100)
    with pytest.raises(StageError, match="none of the last two starts made a token"):
        run.run()


def test_a_host_without_the_master_does_not_count_tokens(tmp_path, monkeypatch):
    _, run = supervise(
        tmp_path, monkeypatch, dies(), dies(), dies(), ends, **SECOND_HOST, max_restarts=3
    )
    run.run()


@pytest.mark.parametrize(
    "error",
    [
        StageError("full", is_permanent=True),
        SpecError("bad"),
        CapacityError("full"),
        ValueError("bug"),
    ],
)
def test_what_another_start_would_not_cure_ends_the_run(tmp_path, monkeypatch, error):
    generations, run = supervise(tmp_path, monkeypatch, dies(5, error=error), max_restarts=3)
    with pytest.raises(type(error)):
        run.run()
    assert len(generations.jobs) == 1


def test_an_engine_is_started_anew_in_its_folder_once_it_has_served(tmp_path, monkeypatch):
    found = []

    def lost(job: Job, folder: Path, monitor: Ranks) -> None:
        found.append(sorted(path.name for path in folder.iterdir()))
        (folder / "rendezvous").touch()
        if len(found) == 1:
            monitor.serve()
        raise StageError("stage 1: was ended by SIGKILL")

    monkeypatch.setattr(module, "launch", Generations(lost, lost, lost))
    with Ranks(PLAN, FaultOptions(max_restarts=2)) as ranks:
        job, _ = ranks.socket_job(tmp_path, task="online")
        with pytest.raises(StageError, match="anew 2 of 2 times, no more"):
            ranks.run(job)
    assert found == [["control", "job.json", "strategy.json"]] * 3
    assert len(ranks.restarts) == 2


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_host_without_the_master_starts_an_engine_anew_once_it_was_loaded(
    tmp_path, monkeypatch, is_loaded
):
    states = []

    def lost(job: Job, folder: Path, monitor: Ranks) -> None:
        if is_loaded:
            monitor.report(Event(rank=1, kind="ready", done=1, total=1))
        states.append(monitor.state)
        raise StageError("rank 0 is gone")

    monkeypatch.setattr(module, "launch", Generations(lost, lost))
    with Ranks(faults=FaultOptions(max_restarts=1), **SECOND_HOST) as ranks:
        job, _ = ranks.socket_job(tmp_path, task="online")
        with pytest.raises(StageError, match="rank 0 is gone"):
            ranks.run(job)
    assert len(ranks.restarts) == is_loaded
    assert states == (["serving"] * 2 if is_loaded else ["starting"])


def test_a_stage_that_is_loaded_says_nothing_of_the_master(tmp_path, monkeypatch):
    def lost(job: Job, folder: Path, monitor: Ranks) -> None:
        monitor.report(Event(rank=1, kind="ready", done=1, total=1))
        raise StageError("rank 0 is gone")

    monkeypatch.setattr(module, "launch", Generations(lost))
    with Ranks(PLAN, FaultOptions(max_restarts=1)) as ranks:
        job, _ = ranks.socket_job(tmp_path, task="online")
        with pytest.raises(StageError):
            ranks.run(job)
    assert not ranks.restarts


class OtherHosts:
    """Stands for the monitor of other hosts: what is left of the plan after each loss."""

    def __init__(self, *left):
        self._left = list(left)

    def check(self):
        raise StageError("b is lost")

    def next_start(self):
        found = self._left.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


def loses_a_host(plans: list[Plan]) -> Callable[[Job, Path, Ranks], None]:
    def play(job: Job, folder: Path, monitor: Ranks) -> None:
        plans.append(read_plan(job.strategy))
        monitor.check()

    return play


def test_an_engine_goes_on_without_a_lost_host_however_many_restarts_are_allowed(
    tmp_path, monkeypatch
):
    plans: list[Plan] = []

    def works(job: Job, folder: Path, monitor: Ranks) -> None:
        plans.append(read_plan(job.strategy))
        assert job.rendezvous.address is None

    generations = Generations(loses_a_host(plans), works)
    monkeypatch.setattr(module, "launch", generations)
    two, hosts = SECOND_HOST["plan"], Hosts(num_nodes=2, node_rank=0, address=("127.0.0.1", 1))
    others = OtherHosts((PLAN, Hosts()))
    with Ranks(two, FaultOptions(max_restarts=0), hosts=hosts, monitor=others) as ranks:
        job, _ = ranks.socket_job(tmp_path, task="online")
        ranks.run(job)
    assert plans == [two, PLAN]
    assert generations.jobs[0].rendezvous.address == ("127.0.0.1", 1)
    assert [one.cause for one in ranks.restarts] == ["b is lost"]


@pytest.mark.parametrize(
    ("left", "error", "message"),
    [(None, StageError, "b is lost"), (InfeasibleError("too large"), InfeasibleError, "large")],
)
def test_without_another_plan_the_loss_of_a_host_is_the_end(
    tmp_path, monkeypatch, left, error, message
):
    monkeypatch.setattr(module, "launch", Generations(loses_a_host([])))
    with Ranks(PLAN, FaultOptions(max_restarts=0), monitor=OtherHosts(left)) as ranks:
        job, _ = ranks.socket_job(tmp_path, task="online")
        with pytest.raises(error, match=message):
            ranks.run(job)


def test_nothing_but_answers_is_started_anew(tmp_path, monkeypatch):
    _, run = supervise(tmp_path, monkeypatch, dies(5), task="hidden", max_restarts=3)
    with pytest.raises(StageError):
        run.run()


@pytest.mark.parametrize("wrong", [{"max_restarts": -1}, {"drain_timeout_s": float("nan")}])
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(SpecError):
        FaultOptions(**wrong)


def test_health_follows_the_run(tmp_path, monkeypatch):
    path = tmp_path / "health.json"
    seen = []

    def look(*_) -> None:
        seen.append(json.loads(path.read_text()))

    def dies_watched(job: Job, folder: Path, monitor: Ranks) -> None:
        look()
        monitor.report(Event(rank=0, kind="tokens", done=3, total=9))
        look()
        raise StageError("stage 1: was ended by SIGKILL")

    _, run = supervise(tmp_path, monkeypatch, dies_watched, look, max_restarts=1, health=path)
    run.run()
    look()
    assert [one["state"] for one in seen] == ["starting", "serving", "restarting", "done"]
    assert [one["is_healthy"] for one in seen] == [False, True, False, True]
    assert [one["restarts"] for one in seen] == [0, 0, 1, 1]
    assert seen[2]["cause"] == "stage 1: was ended by SIGKILL"
    _, run = supervise(
        (tmp_path / "b").mkdir() or tmp_path / "b",
        monkeypatch,
        dies(5),
        max_restarts=0,
        health=path,
    )
    with pytest.raises(StageError):
        run.run()
    look()
    assert (seen[-1]["state"], seen[-1]["is_healthy"]) == ("failed", False)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def asked(seconds_ago: float) -> StopRequest:
    clock = Clock()
    stop = StopRequest(clock)
    stop.request("SIGTERM")
    clock.now_s = seconds_ago
    return stop


def checks(serving: bool):
    def play(job: Job, folder: Path, monitor: Ranks) -> None:
        if serving:
            monitor.report(Event(rank=0, kind="tokens", done=0, total=9))
        monitor.check()
        monitor.check()
        assert drain_file(folder).exists()

    return play


def test_a_run_that_serves_drains(tmp_path, monkeypatch, caplog):
    _, run = supervise(tmp_path, monkeypatch, checks(True), stop=asked(29))
    assert run.run() == DONE
    assert caplog.text.count("SIGTERM: finishing what has begun") == 1


def test_a_drain_is_bounded(tmp_path, monkeypatch):
    _, run = supervise(tmp_path, monkeypatch, checks(True), stop=asked(31))
    with pytest.raises(StoppedError, match=r"not finished within 30 s.* 0 answers, --resume"):
        run.run()


@pytest.mark.parametrize(("serving", "place"), [(False, {}), (True, SECOND_HOST)])
def test_a_run_that_has_begun_nothing_ends_at_once(tmp_path, monkeypatch, serving, place):
    _, run = supervise(tmp_path, monkeypatch, checks(serving), **place, stop=asked(0))
    with pytest.raises(StoppedError, match="nothing had begun") as caught:
        run.run()
    assert caught.value.exit_status == 130


def test_a_rank_lost_while_draining_is_not_started_anew(tmp_path, monkeypatch):
    _, run = supervise(tmp_path, monkeypatch, dies(5), stop=asked(1), max_restarts=3)
    with pytest.raises(StageError):
        run.run()


def test_the_first_signal_asks_and_the_second_interrupts():
    before = signal.getsignal(signal.SIGTERM)
    stop = StopRequest()

    def run() -> None:
        with stop.from_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.is_requested
            assert stop.source == "SIGTERM"
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(PATIENCE_S)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)  # unwinding is not interrupted

    with pytest.raises(KeyboardInterrupt):
        run()
    assert signal.getsignal(signal.SIGTERM) is before
