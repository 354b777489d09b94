"""The environment of a CPU worker, in a process that has it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from llmpq.dist.launch import process_environment
from llmpq.dist.launch.process_environment import cpu_environment, usable_isas

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


@pytest.fixture
def processor(monkeypatch):
    """A processor with some extensions, and a process limited to one of them."""

    def install(flags, own=None):
        monkeypatch.setattr(process_environment, "cpuinfo", lambda _: flags)
        if own is None:
            monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
        else:
            monkeypatch.setenv("ATEN_CPU_CAPABILITY", own)

    return install


FLAGS = "sse4_1 avx2 avx512f"


@pytest.mark.parametrize(
    ("flags", "own", "found"),
    [
        (FLAGS, None, ("sse4", "avx2", "avx512")),
        (FLAGS, "avx2", ("sse4", "avx2")),
        (FLAGS, "default", ("sse4",)),
        ("sse4_1 avx2", None, ("sse4", "avx2")),
        ("", None, ()),  # not x86-64
    ],
)
def test_a_worker_can_be_limited_to_what_this_process_may_use(processor, flags, own, found):
    processor(flags, own)
    assert usable_isas(os.environ) == found


@pytest.mark.parametrize(
    ("flags", "own", "asked", "torchs"),
    [
        (FLAGS, None, "avx512", "avx512"),
        (FLAGS, None, "avx2", "avx2"),
        (FLAGS, "avx2", "avx512", "avx2"),
        (FLAGS, "default", "avx2", "default"),
        ("sse4_1 avx2", None, "avx512", "avx2"),
        ("sse4_1", None, "avx512", "default"),
        ("", None, "avx2", None),
    ],
)
def test_a_limit_never_gives_more_than_the_processor_has(processor, flags, own, asked, torchs):
    """torch would use AVX-512 where its variable says so, and end with an illegal instruction."""
    processor(flags, own)
    assert cpu_environment(1, asked).get("ATEN_CPU_CAPABILITY") == torchs
