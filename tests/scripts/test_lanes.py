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


def test_a_lane_replaces_its_own_rows_of_the_report_alone(report, monkeypatch):
    known = [lane("one", f"print({PYTEST!r})"), lane("two", "import sys; sys.exit(3)")]
    monkeypatch.setattr(lanes_report, "lanes", lambda: known)
    assert lanes_report.main(["--output", str(report)]) == 1
    ran, skipped = (item["rows"] for item in json.loads(report.read_text())["tables"])
    assert [(row["lane"], row["result"]) for row in ran] == [
        ("one", "passed"),
        ("two", "failed with status 3"),
    ]
    assert (ran[0]["passed"], ran[0]["processor"]) == (708, "a processor")
    assert [row["reason"] for row in skipped] == ["no compiler here", "could not import 'ray'"]
    known[0] = lane("one", "print('nothing is counted')")
    assert lanes_report.main(["--only", "one", "--output", str(report)]) == 0
    ran, skipped = (item["rows"] for item in json.loads(report.read_text())["tables"])
    assert [(row["lane"], row["passed"]) for row in ran] == [("one", None), ("two", None)]
    assert skipped == []


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
        assert word == "-m" or (ROOT / word).is_file()
        assert shutil.which(one.command[0].replace("PYTHON", sys.executable), path=str(ROOT))
    names = [one.name for one in lanes_report.lanes()]
    assert len(set(names)) == len(names)
