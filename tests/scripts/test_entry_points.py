"""Every program outside the package starts: it imports, and describes its options."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "reproduce", "scripts", "tools")
PROGRAMS = sorted(
    path.relative_to(ROOT)
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)
NEEDS_OTHERS = {
    "benchmarks/ray_serve.py",
    "scripts/interop/autoawq_fixture.py",
    "scripts/interop/autoround_fixture.py",
    "scripts/interop/compressed_tensors_fixture.py",
    "scripts/interop/modelopt_fixture.py",
    "scripts/interop/mxfp4_fixture.py",
}
"""Programs that import libraries which ``.venv`` lacks."""
WITHOUT_OPTIONS = {
    "tools/boxes/wire.py",
    "scripts/config_defaults.py",
    "scripts/docs_site/cli_reference.py",
    "scripts/interop/converter.py",
    "scripts/interop/ours.py",
    "scripts/processor.py",
}
"""Programs that take words, or nothing: these are imported."""
PLACES = tuple(f"{ROOT / folder}{os.sep}" for folder in FOLDERS)


def modules_of_programs():
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    return {name: sys.modules[name] for name in files if str(files[name]).startswith(PLACES)}


@pytest.fixture
def alone(monkeypatch):
    """Leave nothing of a program behind: modules, paths, variables.

    Programs of one folder import each other by names that others have as well.
    """
    before, variables = modules_of_programs(), dict(os.environ)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in before:
        del sys.modules[name]
    yield
    for name in modules_of_programs():
        del sys.modules[name]
    sys.modules.update(before)
    os.environ.clear()
    os.environ.update(variables)


@pytest.mark.parametrize(
    "program", [path for path in PROGRAMS if str(path) not in NEEDS_OTHERS], ids=str
)
def test_a_program_describes_its_options(program, alone, monkeypatch, capsys):
    sys.path.insert(0, str((ROOT / program).parent))
    monkeypatch.setattr(sys, "argv", [str(program), "--help"])
    if str(program) in WITHOUT_OPTIONS:
        runpy.run_path(str(ROOT / program), run_name="imported")
        return
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / program), run_name="__main__")
    assert ended.value.code in (None, 0)
    assert "--help" in capsys.readouterr().out


def test_all_programs_are_found_and_every_exception_is_one():
    named = NEEDS_OTHERS | WITHOUT_OPTIONS
    assert named < {str(path) for path in PROGRAMS}
    assert {path.parts[0] for path in PROGRAMS} == set(FOLDERS)
