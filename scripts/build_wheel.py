"""Build the sdist and a wheel with prebuilt C libraries. See ``scripts/build_wheel``."""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from llmpq.assigner.exact import native as core
from llmpq.kernels.cpu import native
from llmpq.multillm.engine import law as engine
from llmpq.native_build import NotCompiledError, library_path

ROOT = Path(__file__).resolve().parent.parent
BASELINE = ("-march=x86-64-v2",)
"""Instructions that the planner's core and the oldest kernels may use (any x86-64 since 2009)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Build both files and print their names."""
    parser = argparse.ArgumentParser(prog="scripts/build_wheel", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="where to write")
    options = parser.parse_args(argv)
    if platform.machine() != "x86_64" or sys.platform != "linux":
        found = f"{sys.platform} on {platform.machine()}"
        advice = "expected Linux on x86_64: 'pip wheel .' makes a wheel that compiles on first use"
        print(f"scripts/build_wheel: error: found {found}, {advice}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="llmpq-wheel-") as name:
        tree, built = Path(name) / "tree", Path(name) / "built"
        copy_sources(tree)
        built.mkdir()
        run_backend("build_sdist", tree, built)
        libraries = compile_libraries(tree / "llmpq")
        run_backend("build_wheel", tree, built)
        tag_wheel(next(built.glob("*.whl")), manylinux_tag(libraries))
        options.output.mkdir(parents=True, exist_ok=True)
        for file in sorted(built.iterdir()):
            shutil.copy2(file, options.output / file.name)
            print(options.output / file.name)
    return 0


def copy_sources(target: Path) -> None:
    """Copy the files that git tracks, or the whole tree of an unpacked sdist."""
    listed = tracked_files()
    if listed is None:
        shutil.copytree(ROOT, target, ignore=left_out)
        return
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def left_out(folder: str, names: list[str]) -> set[str]:
    """Return what is no source; ``llmpq/dist`` is one, ``dist`` beside it is not."""
    found = {name for name in names if name == "__pycache__" or name.endswith(".egg-info")}
    return found | ({".venv", ".git", "build", "dist"} if Path(folder) == ROOT else set())


def tracked_files() -> str | None:
    """Return the files that git tracks or would, ``None`` without git or outside a checkout."""
    if shutil.which("git") is None:  # in an image, say
        return None
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return None if listed.returncode else listed.stdout


def compile_libraries(package: Path) -> list[Path]:
    """Put the planner's core and the kernels of every instruction set into ``package``.

    They are compiled in this checkout, where later builds and runs find them.
    """
    exact, apps, cpu = (
        Path(file).parent.relative_to(ROOT / "llmpq")
        for file in (core.__file__, engine.__file__, native.__file__)
    )
    jobs = [
        (exact, "_core", "exact", (*core.FLAGS, *BASELINE)),
        (apps, "_engine", "engine", (*engine.FLAGS, *BASELINE)),
    ]
    for name, flags in native.FLAGS.items():
        extra = BASELINE if name == "baseline" else ()
        jobs.append((cpu, f"_kernels-{name}", f"kernels-{name}", (*flags, *extra)))
    made = []
    for folder, shipped, kept, flags in jobs:
        try:
            path = library_path(ROOT / "llmpq" / folder, kept, flags)
        except NotCompiledError as error:
            raise SystemExit(f"scripts/build_wheel: error: {error}") from None
        made.append(package / folder / f"{shipped}.x86_64-linux-gnu.so")
        subprocess.run(["strip", "-o", str(made[-1]), str(path)], check=True)
    return made


def run_backend(hook: str, tree: Path, output: Path) -> None:
    """Call one hook of the build backend (PEP 517) with the installed setuptools."""
    program = f"import sys; from setuptools import build_meta; build_meta.{hook}(sys.argv[1])"
    command = [sys.executable, "-c", program, str(output)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"scripts/build_wheel: error: {hook}: {done.stderr.strip()[-2000:]}")


def manylinux_tag(libraries: Sequence[Path]) -> str:
    """Return the platform tag for the newest glibc symbol that the libraries need (PEP 600)."""
    found = {
        (int(match[1]), int(match[2]))
        for library in libraries
        for match in re.finditer(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes())
    }
    major, minor = max(found | {(2, 17)})
    return f"manylinux_{major}_{minor}_x86_64"


def tag_wheel(wheel: Path, platform_tag: str) -> None:
    """Rename ``wheel`` to a wheel of one platform: it holds machine code, no Python extension."""
    command = [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", platform_tag]
    subprocess.run([*command, str(wheel)], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
