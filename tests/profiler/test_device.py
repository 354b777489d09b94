"""What the profiler says of this machine agrees with the operating system."""

from __future__ import annotations

import os

import pytest

from llmpq.profiler import device
from llmpq.profiler.device import available_cores, cpu_isas, cpu_name, cpu_quota
from llmpq.spec.cluster import CPU_ISAS


def test_available_cores_are_those_of_this_process():
    assert set(available_cores()) == set(os.sched_getaffinity(0))


def test_cpu_isas_are_known_and_in_order():
    found = cpu_isas()
    assert [isa for isa in CPU_ISAS if isa in found] == list(found)
    assert cpu_name()


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu/a/cpu.cfs_quota_us": "5000\n", "cpu/a/cpu.cfs_period_us": "10000\n"}, 0.5),
        ({"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "10000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "15000\n", "cpu/cpu.cfs_period_us": "10000\n"}, 1.5),
        ({}, None),
    ],
)
def test_a_quota_is_that_of_the_group_or_of_one_around_it(tmp_path, monkeypatch, files, quota):
    check_quota(tmp_path, monkeypatch, files, "4:memory:/b\n1:cpu:/a\n", quota)


@pytest.mark.parametrize(("text", "quota"), [("150000 100000\n", 1.5), ("max 100000\n", None)])
def test_a_quota_of_version_two(tmp_path, monkeypatch, text, quota):
    check_quota(tmp_path, monkeypatch, {"a/cpu.max": text}, "0::/a\n", quota)


def check_quota(tmp_path, monkeypatch, files, groups, quota):
    monkeypatch.setattr(device, "CGROUPS", tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "self").write_text(groups)
    assert cpu_quota(tmp_path / "self") == quota
