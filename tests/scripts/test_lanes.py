"""``scripts/lanes``: what it reads from the output of a lane, and its report."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from scripts import lanes_report
from scripts.lanes_report import Lane

ROOT = Path(__file__).resolve().parents[2]
PYTEST = """\
..s.F
SKIPPED [2] tests/a.py:3: no compiler here
SKIPPED [1] tests/a.py:9: no compiler here
SKIPPED [1] tests/b.py: could not import 'ray'
= 3 failed, 708 passed, 4 skipped, 2 errors in 289.85s (0:04:49) =
"""


@pytest.fixture
def report(tmp_path, monkeypatch):
    monkeypatch.setattr(lanes_report, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(lanes_report, "processor_of", lambda _: "a processor")
    monkeypatch.setattr(lanes_report, "described", lambda: "a processor")
    return tmp_path / "lanes.json"


def lane(name, code, **more):
    return Lane(name=name, checks="a test", command=("PYTHON", "-c", code), **more)


def test_counts_and_reasons_are_read_from_pytest():
    assert lanes_report.counts(PYTEST) == {"passed": 708, "failed": 5, "skipped": 4}
    assert lanes_report.skips(PYTEST) == [
        {"tests": 3, "file": "tests/a.py", "reason": "no compiler here"},
        {"tests": 1, "file": "tests/b.py", "reason": "could not import 'ray'"},
    ]
    assert set(lanes_report.counts("all is well").values()) == {None}


def test_the_gate_runs_pytest_several_times_and_repeats_what_failed():
    text = f"{PYTEST}5 passed in 0.12s\n5 passed and more\n\n== failed: cli\n{PYTEST}"
    assert lanes_report.counts(text) == {"passed": 713, "failed": 5, "skipped": 4}


def test_a_lane_beside_busy_processes_has_a_row_of_its_own(report, monkeypatch):
    monkeypatch.setattr(lanes_report, "lanes", lambda: [lane("one", "print('3 passed in 1.0s')")])
    for busy in ("0", "2"):
        assert lanes_report.main(["--output", str(report), "--busy", busy]) == 0
    ran = json.loads(report.read_text())["tables"][0]["rows"]
    assert [row["lane"] for row in ran] == ["one", "one beside 2 busy processes"]


def test_busy_processes_compute_until_the_lane_ends():
    with lanes_report.busy_processes(2) as processes:
        assert [process.poll() for process in processes] == [None, None]
    assert all(process.returncode for process in processes)


def test_a_lane_is_held_to_its_vector_extensions(report, monkeypatch):
    code = "import os; print(os.environ['ATEN_CPU_CAPABILITY']); assert 0"
    monkeypatch.setattr(lanes_report, "lanes", lambda: [lane("sse4", code, isa="sse4")])
    monkeypatch.setattr(
        lanes_report, "cpu_environment", lambda _, isa: {"ATEN_CPU_CAPABILITY": isa}
    )
    assert lanes_report.main(["--output", str(report)]) == 1
    assert (report.parent / "cache/sse4/log.txt").read_text().startswith("sse4\n")


def test_every_lane_runs_what_exists():
    for one in lanes_report.lanes():
        word = next(word for word in one.command if word != "PYTHON")
        assert word == "-m" or (ROOT / word).exists()
        assert shutil.which(one.command[0].replace("PYTHON", sys.executable), path=str(ROOT))
    names = [one.name for one in lanes_report.lanes()]
    assert len(set(names)) == len(names)


def test_processes_of_a_lanes_environment_find_this_checkout(monkeypatch, tmp_path):
    lane = lanes_report.Lane(name="one", checks="", command=(), packages=("nothing",))

    def install(command):
        if "venv" in command:
            (tmp_path / "venv" / "lib" / "python3" / "site-packages").mkdir(parents=True)

    monkeypatch.setattr(lanes_report, "_install", install)
    lanes_report.environment_of(lane, tmp_path)
    (paths,) = tmp_path.rglob("ours.pth")
    assert str(lanes_report.ROOT) in paths.read_text().splitlines()
