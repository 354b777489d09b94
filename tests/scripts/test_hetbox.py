"""Boxes: what they give a device, what they end, and that nothing of them stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.clocks import PATIENCE_S

from llmpq.dist.launch.worker import NAME
from llmpq.errors import SpecError
from llmpq.spec.cluster import Cluster, DeviceGroup, Node

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.boxes.devices import (  # noqa: E402
    RANK_NAME,
    _children_among_all,
    children_of,
    has_begun,
    rank_of,
    spaces_of,
)
from tools.boxes.groups import groups  # noqa: E402

pytestmark = pytest.mark.nightly

CLUSTER = """{"schema": 1, "name": "box", "links": [], "nodes": [{"name": "here", "devices":
  [{"type": "cpu", "count": 1, "threads": 1, "cpu_share": 0.5, "memory_bytes": 100000000}]}]}"""


def devices(*shares, threads=1, kind="cpu"):
    made = tuple(
        DeviceGroup(type=kind, count=1, threads=threads, cpu_share=share) for share in shares
    )
    return list(Cluster(name="box", nodes=(Node(name="here", devices=made),)).devices)


def can_box():
    try:
        with groups(1):
            return True
    except OSError:
        return False


needs_groups = pytest.mark.skipif(not can_box(), reason="needs root and control groups")


def test_devices_fill_the_cores_and_those_of_one_core_take_turns():
    found = spaces_of(devices(0.25, None, 0.5), [4, 7])
    assert [space.cores for space in found] == [(7,), (4,), (7,)]
    assert [space.share for space in found] == [0.25, 1.0, 0.5]
    assert [space.begin for space in found] == [0.5, 0.0, 0.0]
    assert "25% of core 7" in str(found[0])


@pytest.mark.parametrize(
    ("asked", "cores", "said"),
    [
        (devices(None, None, 0.5), [0, 1], "found 1 threads of 50% of a core"),
        (devices(None, threads=3), [0, 1], "found 3 threads of 100%"),
        (devices(None, kind="T4-16G"), [0, 1], "found type 'T4-16G', expected cpu"),
    ],
)
def test_more_than_the_host_has_is_refused(asked, cores, said):
    with pytest.raises(SpecError, match=said):
        spaces_of(asked, cores)


def test_only_workers_have_ranks():
    assert rank_of(os.getpid()) is None
    assert rank_of(2**22 + 1) is None


@pytest.mark.parametrize("look", [children_of, _children_among_all])
def test_children_are_found_and_no_other_process(look):
    words = [sys.executable, "-c", "import sys; sys.stdin.readline()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
        assert process.pid in look({os.getpid()})
        assert os.getpid() not in look({os.getpid()})
        assert look({process.pid}) == []
        process.communicate(b"\n")


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="needs /proc")
def test_a_rank_has_begun_when_it_calls_itself_so():
    steps = (
        "import sys",
        "print(flush=True); sys.stdin.readline()",
        f"open('/proc/self/comm', 'w').write('{NAME}3')",
        "print(flush=True); sys.stdin.readline()",
    )
    words = [sys.executable, "-c", "\n".join(steps)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert not has_begun(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        assert has_begun(process.pid)
    assert RANK_NAME == NAME


def hetbox(tmp_path, code):
    file = tmp_path / "cluster.json"
    file.write_text(CLUSTER)
    words = ["device", str(file), "here/cpu#0", sys.executable, "-c", code]
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.Popen(
        [ROOT / "tools" / "hetbox", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def boxes_left(pid):
    # os.walk goes on where a folder is removed meanwhile; Path.glob fails.
    walked = os.walk("/sys/fs/cgroup")
    return [
        name for _, names, _ in walked for name in names if name.startswith(f"llmpq-box-{pid}-")
    ]


@needs_groups
def test_a_command_that_fits_ends_as_it_would(tmp_path):
    code = "import os, sys; print(os.sched_getaffinity(0)); sys.exit(3)"
    with hetbox(tmp_path, code) as process:
        output, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 3
    assert len(output.strip("{}\n").split(",")) == 1
    assert "50% of core" in said
    assert "memory full" not in said
    assert boxes_left(process.pid) == []


@needs_groups
def test_a_command_that_does_not_fit_is_ended(tmp_path):
    code = "import time; data = bytearray(200_000_000); time.sleep(600); print('alive')"
    with hetbox(tmp_path, code) as process:
        output, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGKILL
    assert "alive" not in output
    assert "memory full" in said


@needs_groups
def test_nothing_outlives_a_killed_box(tmp_path):
    with hetbox(
        tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    ) as box:
        child = int(box.stdout.readline())
        box.kill()
    deadline = time.monotonic() + PATIENCE_S
    while (boxes_left(box.pid) or is_alive(child)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert boxes_left(box.pid) == []
    assert not is_alive(child)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
