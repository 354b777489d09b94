"""What other programs take of a thread's CPU time is read from the kernel's own counts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from llmpq.dist.metrics import measurement as module
from llmpq.dist.metrics.measurement import CoreTime, TakenShare, busy_text, core_time, is_busy

BUSY_LOOP = "import os\nprint(flush=True)\nwhile os.getppid() == {parent}: pass"


def counted(*times):
    """Return a reader that gives one of these (ran, taken) pairs after the other."""
    left = [CoreTime(ran_s=ran, taken_s=taken) for ran, taken in times]
    return lambda _: left.pop(0)


def test_the_share_is_that_of_the_time_the_thread_wanted():
    taken = TakenShare(counted((10.0, 4.0), (13.0, 5.0)))
    assert taken.share() == pytest.approx(1.0 / 4.0)


def test_a_thread_that_did_nothing_lost_nothing():
    assert TakenShare(counted((10.0, 4.0), (10.0, 4.0))).share() == 0.0


def test_a_kernel_that_does_not_count_gives_no_share(tmp_path):
    assert core_time(threading.get_native_id(), tasks=tmp_path) is None
    assert TakenShare(lambda _: None).share() is None
    assert not is_busy(None)


def test_waiting_and_what_the_hypervisor_took_count_alike(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2})
    monkeypatch.setattr(os, "sysconf", lambda _: 100)
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "schedstat").write_text("3000000000 500000000 12\n")
    stat = tmp_path / "stat"
    cores = {"cpu": 900, "cpu0": 100, "cpu1": 700, "cpu2": 300}
    lines = [f"{name} 1 2 3 4 5 6 7 {steal} 0 0" for name, steal in cores.items()]
    stat.write_text("\n".join([*lines, "intr 5", ""]))
    found = core_time(7, tasks=tmp_path, stat=stat)
    assert found == CoreTime(ran_s=3.0, taken_s=0.5 + 2.0)


def test_a_busy_program_on_the_same_core_is_noticed():
    me = threading.get_native_id()
    if core_time(me) is None:
        pytest.skip("the kernel does not count how long a thread waits for its core")
    before = os.sched_getaffinity(me)
    os.sched_setaffinity(me, {min(before)})  # the child inherits it
    try:
        child = subprocess.Popen(
            [sys.executable, "-c", BUSY_LOOP.format(parent=os.getpid())], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        child.stdout.readline()
        taken, start_s = TakenShare(), time.thread_time()
        while time.thread_time() - start_s < 0.1:
            pass
        share = taken.share()
        child.kill()
        child.communicate()
    finally:
        os.sched_setaffinity(me, before)
    # Half of the core; more where yet other programs compute.
    assert share is not None
    assert share > 0.25
    assert is_busy(share)


def test_a_table_states_the_share():
    key, text = module.provenance_line(0.5404)
    assert module.share_in({key: text}) == pytest.approx(0.54)
    assert module.share_in({}) is None


def test_the_message_names_ranks_whose_share_is_known():
    shares = {"rank 0": 0.54, "rank 1": None, "rank 2": 0.02}
    assert busy_text(shares) == "CPU busy with other programs: rank 0 54%, rank 2 2%"
    assert busy_text({"": 0.5}, "while it ran") == "CPU busy with other programs while it ran: 50%"
    assert busy_text({"": None}) == "CPU busy with other programs: unknown"
