"""The environment of a CPU worker, in a process that has it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from llmpq.dist.launch.process_environment import cpu_environment

GROWTH = """
import ctypes

MIB = 2**20
libc = ctypes.CDLL(None)
libc.free.argtypes = [ctypes.c_void_p]
libc.sbrk.restype = ctypes.c_void_p
libc.mallopt(-3, 16 * MIB)  # as while serving
libc.mallopt(-1, 2**31 - 1)

def taken(size):
    block = ctypes.c_void_p()
    assert libc.posix_memalign(ctypes.byref(block), 64, size) == 0
    return block

start = libc.sbrk(0)
held = [taken(2 * MIB), taken(2 * MIB)]
for _ in range(20):
    between = taken(MIB)
    held.append(taken(2 * MIB))
    libc.free(held.pop(0))
    libc.free(between)
print((libc.sbrk(0) - start) / MIB)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc for its heap")
def test_freed_blocks_are_reused_for_blocks_of_the_same_size():
    child = subprocess.run(
        [sys.executable, "-c", GROWTH],
        env=os.environ | cpu_environment(1),
        capture_output=True,
        text=True,
        check=True,
    )
    # At most 7 MiB are allocated at a time; without the tunables glibc 2.36 takes 23.
    assert float(child.stdout) < 10
