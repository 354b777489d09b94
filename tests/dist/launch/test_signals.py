"""The flag that asks the master to drain."""

from __future__ import annotations

from llmpq.dist.launch.signals import CHECK_INTERVAL_S, DrainFlag, drain_file


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
