"""How ranks are laid out, and which failure is called the cause of the others."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.draft_plans import with_draft
from helpers.ranks import make_plan

from llmpq.dist.io.job import Job, Rendezvous
from llmpq.dist.launch.process_environment import cpu_environment, pin
from llmpq.dist.launch.ranks import (
    ErrorRecord,
    _cause,
    _cores,
    _start,
    rank_environment,
    ranks_of_node,
    write_error_record,
)
from llmpq.errors import CapacityError, LlmpqError, SpecError, StageError
from llmpq.spec.cluster import Cluster, DeviceGroup, Node


def _cluster(**group: object) -> Cluster:
    """Devices 0 and 1 stand on node a, 2 on node b."""
    return Cluster(
        name="two",
        nodes=(
            Node(name="a", devices=(DeviceGroup(type="cpu", count=2, **group),)),
            Node(name="b", devices=(DeviceGroup(type="cpu", count=1, threads=3),)),
        ),
    )


def _of_threads(threads: int) -> Cluster:
    """One device."""
    group = DeviceGroup(type="cpu", count=1, threads=threads)
    return Cluster(name="x", nodes=(Node(name="x", devices=(group,)),))


def _plan(**group: object):
    return make_plan((0, 1, 2, 3), cluster=_cluster(**group))


def test_ranks_follow_the_nodes_of_their_devices():
    assert ranks_of_node(_plan(), 0, 1) == [0, 1, 2]
    assert ranks_of_node(_plan(), 0, 2) == [0, 1]
    assert ranks_of_node(_plan(), 1, 2) == [2]


@pytest.mark.parametrize(("node_rank", "num_nodes"), [(2, 2), (-1, 2), (0, 3), (0, 0)])
def test_hosts_that_the_plan_does_not_have_are_refused(node_rank, num_nodes):
    with pytest.raises(SpecError, match="the 2 nodes of the plan"):
        ranks_of_node(_plan(), node_rank, num_nodes)


def test_a_rank_gets_torchruns_variables_and_its_devices():
    plan = _plan(threads=2, cpu_isa="sse4")
    found = rank_environment(plan, 1, [0, 1])
    assert found["RANK"] == "1"
    assert found["LOCAL_RANK"] == "1"
    assert found["WORLD_SIZE"] == "3"
    assert found["LOCAL_WORLD_SIZE"] == "2"
    assert found["OMP_NUM_THREADS"] == "2"
    assert found["OMP_WAIT_POLICY"] == "PASSIVE"
    assert found["ATEN_CPU_CAPABILITY"] == "default"
    other = rank_environment(plan, 2, [2])
    assert other["OMP_NUM_THREADS"] == "3"
    assert "ATEN_CPU_CAPABILITY" not in other


@pytest.mark.parametrize(
    ("device", "hosts", "threads", "cores"),
    [(1, [[0, 1, 2]], "1", [{5}, {6}, {6}]), (2, [[0, 1], [2]], "3", [{5}, {6}, {7, 8, 9}])],
)
def test_a_draft_model_is_a_rank_on_the_host_of_its_device(device, hosts, threads, cores):
    """It has the cores of the stage on its device."""
    plan = replace(make_plan((0, 1, 2)), cluster=_cluster(threads=1), dropped_devices=(2,))
    plan = with_draft(plan, "m", device=device)
    assert ranks_of_node(plan, 0, 1) == [0, 1, 2]
    assert [ranks_of_node(plan, node, len(hosts)) for node in range(len(hosts))] == hosts
    found = rank_environment(plan, 2, [0, 1, 2])
    assert (found["RANK"], found["WORLD_SIZE"], found["OMP_NUM_THREADS"]) == ("2", "3", threads)
    assert [_cores(plan, rank, [0, 1, 2], range(5, 10)) for rank in range(3)] == cores


def test_threads_wait_awake_for_each_other_on_cores_of_their_own_alone():
    for threads in (1, 4096):
        found = rank_environment(make_plan((0, 3), cluster=_of_threads(threads)), 0, [0])
        assert "GOMP_SPINCOUNT" not in found
    assert int(cpu_environment(2)["GOMP_SPINCOUNT"]) > 0
    assert "GOMP_SPINCOUNT" not in cpu_environment(2, has_own_cores=False)


def test_cores_are_shared_out_only_when_they_suffice():
    available = sorted(os.sched_getaffinity(0))
    plan = make_plan((0, 3))
    assert _cores(plan, 0, [0], available) == {available[0]}
    many = make_plan((0, 3), cluster=_of_threads(4096))
    assert _cores(many, 0, [0], available) == set()


@pytest.mark.parametrize("pins", [True, False])
def test_workers_are_pinned_unless_asked_not_to_be(pins, tmp_path, monkeypatch):
    class Started:
        pid = 4321

        def __init__(self, *_, **__):
            pass

    pinned: list[tuple[int, set[int]]] = []
    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *found: pinned.append(found))
    paths = {name: tmp_path / name for name in ("strategy", "model_dir", "prompts", "output")}
    job = Job(**paths, rendezvous=Rendezvous(file=tmp_path / "rendezvous"), pins_workers=pins)
    _start(job, make_plan((0, 3)), 0, [0], tmp_path, 1)
    assert pinned == ([(4321, {min(os.sched_getaffinity(0))})] if pins else [])


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.EPERM, "not permitted"), (errno.EINVAL, "Invalid"), (errno.ESRCH, None)],
)
def test_a_host_that_pins_nothing_ends_no_run(number, message, monkeypatch, caplog):
    def refuse(pid, cores):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    pin(4321, {0})
    assert (message or "") in caplog.text
    assert bool(caplog.records) == (message is not None)


def _ended(*codes: str) -> dict[int, subprocess.Popen[bytes]]:
    """Processes that end as Python code says."""
    workers = {
        rank: subprocess.Popen([sys.executable, "-S", "-c", f"import os; {code}"])
        for rank, code in enumerate(codes)
    }
    for worker in workers.values():
        worker.wait()
    return workers


def _record(rank: int, status: int, lost_rank: int | None, message: str = "why") -> ErrorRecord:
    return ErrorRecord(
        rank=rank, message=message, exit_status=status, lost_rank=lost_rank, time_s=time.monotonic()
    )


@pytest.mark.parametrize(
    ("status", "kind"), [(1, LlmpqError), (2, SpecError), (3, CapacityError), (4, StageError)]
)
def test_an_own_error_comes_before_a_lost_peer(tmp_path, status, kind):
    workers = _ended("os._exit(4)", f"os._exit({status})")
    write_error_record(tmp_path, _record(0, 4, lost_rank=1, message="stage 1 closed"))
    write_error_record(tmp_path, _record(1, status, lost_rank=None))
    found = _cause(_plan(), workers, tmp_path)
    assert (type(found), str(found)) == (kind, "why")


def test_a_signal_comes_before_everything(tmp_path):
    workers = _ended("os._exit(4)", "os.kill(os.getpid(), 11)")
    write_error_record(tmp_path, _record(0, 4, lost_rank=1))
    found = _cause(_plan(), workers, tmp_path)
    assert str(found).startswith("stage 1 (rank 1, a/cpu#1 on ")
    assert "SIGSEGV" in str(found)


def test_a_rank_that_left_no_note_is_quoted(tmp_path):
    (tmp_path / "rank-1.log").write_text("Traceback: something\n")
    found = _cause(_plan(), _ended("os._exit(0)", "os._exit(7)"), tmp_path)
    assert "status 7: Traceback: something" in str(found)


def test_a_rank_that_cannot_write_its_reason_names_the_folder(tmp_path, monkeypatch):
    (tmp_path / "rank-0.log").touch()

    def is_full(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_bytes", is_full)
    found = _cause(_plan(), _ended("os._exit(1)"), tmp_path)
    assert f"{tmp_path}: cannot be written: No space left on device" in str(found)
    assert found.is_permanent


def test_a_silent_rank_with_space_is_not_blamed_on_the_disk(tmp_path):
    (tmp_path / "rank-0.log").touch()
    found = _cause(_plan(), _ended("os._exit(1)"), tmp_path)
    assert str(found).endswith("exited with status 1: ")
    assert [file.name for file in tmp_path.iterdir()] == ["rank-0.log"]


def test_the_launching_process_stays_without_torch():
    code = "import sys, llmpq.cli.commands.dist; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
