"""The sdist and the wheel of ``scripts/build_wheel`` install and work outside a checkout."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALGO = "import sys; from llmpq.cli.commands.algo import main; sys.exit(main())"
pytestmark = [
    pytest.mark.slow,  # compiles the libraries of every instruction set
    pytest.mark.skipif(
        platform.machine() != "x86_64" or sys.platform != "linux" or shutil.which("cc") is None,
        reason="wheels with compiled libraries are built on Linux on x86_64 with a C compiler",
    ),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    output = tmp_path_factory.mktemp("built")
    command = [sys.executable, "scripts/build_wheel.py", "--output", str(output)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return output


@pytest.fixture(scope="module")
def site(built, tmp_path_factory):
    """A folder with the installed wheel and nothing else."""
    folder = tmp_path_factory.mktemp("site")
    wheel = next(built.glob("*.whl"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(folder), str(wheel)], check=True)
    return folder


def run_outside(site, tmp_path, *arguments):
    """Run Python with the installed wheel, outside the checkout and without any compiler."""
    environment = os.environ | {"PYTHONPATH": str(site), "PATH": str(tmp_path)}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_holds_the_libraries_of_every_instruction_set(built):
    wheel = next(built.glob("*.whl"))
    assert "-py3-none-manylinux_2_" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("baseline", "avx2", "avx512", "avx512_bf16", "amx"):
        assert f"llmpq/kernels/cpu/_kernels-{name}.x86_64-linux-gnu.so" in names
    assert "llmpq/assigner/exact/_core.x86_64-linux-gnu.so" in names
    assert "llmpq/multillm/engine/_engine.x86_64-linux-gnu.so" in names
    assert not [name for name in names if name.startswith("tests/")]


def test_sdist_holds_the_c_sources_and_data_files(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "llmpq").rglob("*")
        if path.suffix in {".py", ".c", ".h", ".json"} and path.parent.name != "__pycache__"
    }
    assert package <= names
    assert {"README.md", "LICENSE", "pyproject.toml"} <= names


def test_installed_wheel_plans_with_its_prebuilt_core(site, tmp_path):
    text = run_outside(
        site, tmp_path, "-c", ALGO, "--model", "facebook/opt-13b",
        "--device_names", "T4-16G", "V100-32G", "--device_numbers", "2", "1",
        "--global_bz", "8", "--s", "128", "--n", "20", "--output", "plan.json", "--json",
    )  # fmt: skip
    assert json.loads(text)["status"] == "optimal"
    assert (tmp_path / "plan.json").is_file()


def test_installed_wheel_finds_a_kernel_library_for_this_processor(site, tmp_path):
    code = (
        "from llmpq.kernels.cpu import native; import llmpq; "
        "print(llmpq.__file__); print(native.kernels_path(native.instruction_set())); "
        "assert native.library() is not None"
    )
    where, library = run_outside(site, tmp_path, "-c", code).split()
    assert Path(where).is_relative_to(site)
    assert Path(library).is_relative_to(site)
    assert "_kernels-" in library
