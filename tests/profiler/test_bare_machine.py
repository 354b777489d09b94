"""What runs on a machine that has torch, transformers and triton alone, as borrowed GPUs often do.

Every other package that the project may use is missing in the processes started here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PRESENT = ("torch", "transformers", "triton")
USED = (
    "llmpq.api",
    "llmpq.cli.commands.profile",
    "llmpq.dist",
    "llmpq.dist.async_engine",
    "llmpq.dist.launch.worker",
    "llmpq.dist.launch.rank_tasks",
    "llmpq.kernels.gpu.triton_int",
    "scripts.gpu_checks.__main__",
)


def missing_modules() -> list[str]:
    """Top-level modules of all packages but torch, transformers, triton and what they need."""
    needed, waiting = set(), list(PRESENT)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in needed:
            continue
        needed.add(name)
        for text in _requires(name):
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return sorted(
        module
        for module, owners in packages_distributions().items()
        if module.isidentifier()
        and module not in ("llmpq", "tests", "scripts")
        and not {owner.lower().replace("_", "-") for owner in owners} & needed
    )


def _requires(name: str) -> list[str]:
    try:
        return requires(name) or []
    except ModuleNotFoundError:
        return []


def run_without(modules: list[str], code: str) -> subprocess.CompletedProcess[str]:
    blocked = f"import sys; sys.modules.update(dict.fromkeys({modules!r}))\n"
    return subprocess.run(
        [sys.executable, "-c", blocked + code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_packages_of_a_planner_and_of_a_server_are_among_the_missing_ones():
    found = missing_modules()
    assert {"highspy", "fastapi", "uvicorn", "httptools", "starlette"} <= set(found)
    assert not {"torch", "transformers", "triton", "numpy", "safetensors", "tqdm"} & set(found)


def test_what_a_gpu_check_uses_is_imported():
    code = f"import importlib\nfor name in {USED!r}: importlib.import_module(name)"
    done = run_without(missing_modules(), code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", ["layer", "device"])
@pytest.mark.slow
def test_the_profiler_runs(tiny_model, tmp_path, verb):
    if verb == "layer":
        words = ["layer", "--model", str(tiny_model("llama", seed=1)), "--bits", "16", "3"]
        words += ["--batches", "1", "--prompt_tokens", "4", "--context_tokens", "8"]
        words += ["--layers", "1", "--budget", "0.1", "--output", str(tmp_path / "table.csv")]
    else:
        words = ["device", "--name", "mine", "--features", "64", "--budget", "0.1"]
        words += ["--output", str(tmp_path / "device.json"), "--json"]
    code = f"from llmpq.cli.commands.profile import main; sys.exit(main({words!r}))"
    done = run_without(missing_modules(), code)
    assert done.returncode == 0, done.stderr
    if verb == "device":
        assert json.loads(done.stdout)["devices"][0]["type"] == "mine"
