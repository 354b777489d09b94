"""The master hears of the sign to drain soon, and for good."""

from __future__ import annotations

from llmpq.dist.launch.signals import LOOK_S, DrainFlag, drain_file


def test_the_sign_is_seen_within_the_promised_time_and_not_forgotten(tmp_path):
    now_s = [5.0]
    watch = DrainFlag(tmp_path, lambda: now_s[0])
    assert not watch()
    drain_file(tmp_path).touch()
    now_s[0] += LOOK_S
    assert watch()
    drain_file(tmp_path).unlink()
    now_s[0] += LOOK_S
    assert watch()


def test_the_folder_is_not_looked_into_at_every_step(tmp_path):
    now_s = [5.0]
    watch = DrainFlag(tmp_path, lambda: now_s[0])
    assert not watch()
    drain_file(tmp_path).touch()
    now_s[0] += LOOK_S / 2
    assert not watch()


def test_a_sign_from_before_is_seen_at_once(tmp_path):
    drain_file(tmp_path).touch()
    assert DrainFlag(tmp_path)()
