"""Planning on macOS and Windows, as far as Linux can play them; see helpers/other_systems.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.docs_pages import ROOT

SCRIPT = ROOT / "tests" / "helpers" / "other_systems.py"
MODEL = ("--model", "facebook/opt-1.3b", "--device_names", "T4-16G", "V100-32G")
WORK = ("--device_numbers", "1", "1", "--global_bz", "8", "--s", "128", "--n", "20")
TEXT_CALLS = ("read_text(", "write_text(")


def run(system: str | None, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``llmpq`` on a system, ``None`` for this one."""
    start = ["-m", "llmpq.cli.front.program"] if system is None else [str(SCRIPT), system]
    return subprocess.run(
        [sys.executable, *start, *words],
        cwd=ROOT,
        env=dict(PATH="/usr/bin:/bin", PYTHONPATH=str(ROOT), PYTHONUTF8="0", LC_ALL="C.UTF-8"),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> Path:
    """The strategy of this system."""
    file = tmp_path_factory.mktemp("here") / "plan.json"
    done = run(None, "plan", *MODEL, *WORK, "--output", str(file))
    assert done.returncode == 0, done.stderr
    return file


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_plans_are_those_of_linux(system, planned, tmp_path):
    file = tmp_path / "plan.json"
    done = run(system, "plan", *MODEL, *WORK, "--output", str(file))
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    here, there = (json.loads(one.read_text(encoding="utf-8")) for one in (planned, file))
    # Windows has no compiled core: the integer programs answer, which stop at a gap.
    assert there["estimate"]["objective_s"] == pytest.approx(
        here["estimate"]["objective_s"], rel=1e-9 if system == "darwin" else 1e-3
    )
    checked = run(system, "check", str(file))
    assert (checked.returncode, "confirmed" in checked.stdout) == (0, True), checked.stderr


@pytest.mark.parametrize("system", ["darwin", "win32"])
@pytest.mark.parametrize("verb", ["sim", "apps", "profile", "route", "serve", "dist", "chat"])
def test_commands_start(system, verb):
    done = run(system, verb, "--help")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_running_a_model_is_refused_with_what_works(system, planned, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello\n", encoding="utf-8")
    words = ("--strat_file_name", str(planned), "--prompts", str(prompts))
    done = run(system, "dist", *words, "--model", "models/demo", "--output", str(tmp_path / "out"))
    assert done.returncode == 2
    assert f"found {system}, expected linux" in done.stderr
    assert "llmpq plan" in done.stderr


def test_texts_have_a_stated_encoding():
    """Windows reads files in another encoding where none is stated; /proc and /sys are ASCII."""
    found = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in sorted((ROOT / "llmpq").rglob("*.py"))
        for line in file.read_text(encoding="utf-8").splitlines()
        if any(f"{call})" in line for call in TEXT_CALLS)
    ]
    allowed = ("control_groups.py", "profiler/device.py")
    assert [one for one in found if not one.partition(":")[0].endswith(allowed)] == []
