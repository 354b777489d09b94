"""The flag that asks the master to drain."""

from __future__ import annotations

import os
import subprocess
import sys

from helpers.processes import wait_for

from llmpq.dist.launch.signals import CHECK_INTERVAL_S, DrainFlag, drain_file, is_ending


def test_the_flag_is_set_within_the_check_interval_and_stays_set(tmp_path):
    now_s = [5.0]
    watch = DrainFlag(tmp_path, lambda: now_s[0])
    assert not watch()
    drain_file(tmp_path).touch()
    now_s[0] += CHECK_INTERVAL_S
    assert watch()
    drain_file(tmp_path).unlink()
    now_s[0] += CHECK_INTERVAL_S
    assert watch()


def test_the_file_system_is_not_read_at_every_step(tmp_path):
    now_s = [5.0]
    watch = DrainFlag(tmp_path, lambda: now_s[0])
    assert not watch()
    drain_file(tmp_path).touch()
    now_s[0] += CHECK_INTERVAL_S / 2
    assert not watch()


def test_an_existing_file_sets_the_flag_at_once(tmp_path):
    drain_file(tmp_path).touch()
    assert DrainFlag(tmp_path)()


def test_a_killed_process_is_ending_once_its_pipe_is_closed():
    assert not is_ending(os.getpid())
    code = (
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "print(flush=True)\n"
        "time.sleep(600)"
    )
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        assert not is_ending(process.pid)
        process.kill()
        assert process.stdout.read() == b""  # which its end closes
        assert is_ending(process.pid)  # though it was not waited for
    wait_for(lambda: is_ending(process.pid), True.__eq__)
