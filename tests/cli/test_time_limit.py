"""``llmpq-algo --time_limit``: of the whole command, from the start of its process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmpq.cli import common
from llmpq.cli.commands import algo

ROOT = Path(__file__).resolve().parents[2]
ASK = [
    "--model", "facebook/opt-66b", "--workload", str(ROOT / "inputs/workloads/s512-n100-b32.json"),
    "--cluster", str(ROOT / "inputs/clusters/paper-06.json"), "--json",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_command_of_its_own_began_with_its_process() -> None:
    code = (
        "import time; begun = time.monotonic(); time.sleep(0.3)\n"
        "from llmpq.cli.common import command_start_s\n"
        "print(begun - command_start_s(None), begun - command_start_s([]))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    own, called = map(float, said.stdout.split())
    assert own >= -0.02  # the kernel counts hundredths of a second
    assert called <= -0.3


@pytest.mark.parametrize(("age_s", "counted_s"), [(2.5, 2.5), (3600.0, 0.0), (-1.0, 0.0)])
def test_a_process_that_was_there_before_does_not_count(
    monkeypatch: pytest.MonkeyPatch, age_s: float, counted_s: float
) -> None:
    monkeypatch.setattr(common, "_process_age_s", lambda: age_s)
    monkeypatch.setattr(common, "time", SimpleNamespace(monotonic=lambda: 5000.0))
    assert common.command_start_s(None) == 5000.0 - counted_s


def test_where_the_system_does_not_tell_the_command_begins_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(common, "Path", lambda _: Path("/nowhere"))
    assert common._process_age_s() == 0.0


@pytest.mark.parametrize("solver", ["exact", "highs"])
def test_time_that_went_before_the_search_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], solver: str
) -> None:
    monkeypatch.setattr(algo, "command_start_s", lambda _: time.monotonic() - 1000.0)
    assert algo.main([*ASK, "--time_limit", "900", "--solver", solver]) == 0
    late = json.loads(capsys.readouterr().out)
    assert late["status"] == "feasible"
    assert 0 < late["gap"] < 1
    assert late["explanation"]["dropped"] == []
    assert late["hurried"] == []
    monkeypatch.setattr(algo, "command_start_s", lambda _: time.monotonic())
    assert algo.main([*ASK, "--time_limit", "900"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "optimal"
    assert late["bound_s"] <= found["objective_s"] <= late["objective_s"]
