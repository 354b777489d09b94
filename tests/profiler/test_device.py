"""What the profiler says of this machine agrees with the operating system."""

from __future__ import annotations

import os

from llmpq.profiler.device import available_cores, cpu_isas, cpu_name
from llmpq.spec.cluster import CPU_ISAS


def test_available_cores_are_those_of_this_process():
    assert set(available_cores()) == set(os.sched_getaffinity(0))


def test_cpu_isas_are_known_and_in_order():
    found = cpu_isas()
    assert [isa for isa in CPU_ISAS if isa in found] == list(found)
    assert cpu_name()
