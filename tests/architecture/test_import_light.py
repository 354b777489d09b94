"""The plan side imports without torch, and importing llmpq loads the standard library only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import llmpq

PLAN_SIDE = (
    "llmpq.spec",
    "llmpq.batching",
    "llmpq.costmodel",
    "llmpq.assigner",
    "llmpq.multillm.workload",
    "llmpq.api",
    "llmpq.cli.commands.algo",
    "llmpq.cli.commands.serve",
    "llmpq.server.app",
)
HEAVY = ("torch", "transformers", "matplotlib", "scipy", "pandas")


def modules_after(statement: str) -> set[str]:
    """Return the top-level modules a fresh interpreter holds after ``statement``."""
    code = f"{statement}; import sys; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", PLAN_SIDE)
def test_plan_side_imports_without_torch(module):
    assert not {"torch", "transformers"} & modules_after(f"import {module}")


def test_names_of_the_package_load_without_torch():
    statement = f"from llmpq import {', '.join(llmpq.__all__)}"
    assert not {"torch", "transformers"} & modules_after(statement)


def test_type_checkers_see_every_name_of_the_package():
    stub = Path(llmpq.__file__).with_suffix(".pyi").read_text()
    assert [line.split()[-1] for line in stub.splitlines() if " as " in line] == llmpq.__all__


def test_importing_llmpq_loads_the_standard_library_only():
    third_party = {"numpy", "tqdm", "highspy", *HEAVY}
    assert not third_party & modules_after("import llmpq, llmpq.spec.plan, llmpq.spec.catalog")


def test_help_of_a_tensor_command_answers_without_torch():
    loaded = modules_after("from llmpq.cli.commands.profile import main; main(['--help'])")
    assert "torch" not in loaded
