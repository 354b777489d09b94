"""Compiling the core, and the problems that it does not support."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from exact_cases import Shape, random_space
from helpers.processes import is_running, wait_for

from llmpq import native_build
from llmpq.assigner.exact import native
from llmpq.assigner.exact.native import NotCoveredError
from llmpq.assigner.exact.search import solve_exact
from llmpq.errors import InfeasibleError

PACKAGE = Path(native.__file__).parent


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources, and a temporary folder of its own."""
    shutil.copytree(PACKAGE / "csrc", tmp_path / "exact" / "csrc")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(native_build.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    return tmp_path / "exact"


def test_the_core_is_compiled_once_and_kept(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = native.core_path(package)
    assert first.parent == package / "__pycache__"
    monkeypatch.setattr(native_build.shutil, "which", lambda _: None)
    assert native.core_path(package) == first


def test_concurrent_starts_compile_once(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "cc"
    slow.write_text(
        f"#!/bin/sh\necho begun >> {tmp_path}/log\nsleep 0.3\n"
        'while [ "$1" != -o ]; do shift; done\ntouch "$2"\n'
    )
    slow.chmod(0o700)
    monkeypatch.setattr(native_build.shutil, "which", lambda _: str(slow))
    with ThreadPoolExecutor(max_workers=4) as together:
        found = set(together.map(native.core_path, [package] * 4))
    assert len(found) == 1
    units = len(list((package / "csrc").glob("*.c")))
    assert (tmp_path / "log").read_text() == "begun\n" * (units + 1)  # and one links


def test_a_short_time_limit_does_not_wait_for_another_compiler(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "cc"
    begun, ends = tmp_path / "begun", tmp_path / "ends"
    slow.write_text(
        f"#!/bin/sh\ntouch {begun}\nwhile [ ! -e {ends} ]; do sleep 0.05; done\nexit 1\n"
    )
    slow.chmod(0o700)
    monkeypatch.setattr(native_build.shutil, "which", lambda _: str(slow))
    with ThreadPoolExecutor(max_workers=1) as other:
        first = other.submit(native.core_path, package)
        wait_for(begun.exists, bool)
        with pytest.raises(NotCoveredError, match="no time"):
            native.core_path(package, 0.1)
        assert not first.done()
        ends.touch()
        with pytest.raises(NotCoveredError, match="failed"):
            first.result()


def test_changed_sources_are_compiled_again(package: Path) -> None:
    first = native.core_path(package)
    with (package / "csrc" / "lagrangian.c").open("a", encoding="utf-8") as file:
        file.write("\n/* changed */\n")
    assert native.core_path(package) != first


def test_a_prebuilt_core_is_used(package: Path) -> None:
    brought = package / "_core.abi3.so"
    brought.write_bytes(b"")
    assert native.core_path(package) == brought


def test_a_folder_that_others_can_write_to_is_not_used(package: Path) -> None:
    (package / "__pycache__").mkdir()
    (package / "__pycache__").chmod(0o777)
    assert package not in native.core_path(package).parents


def test_without_a_compiler_the_search_is_not_covered(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_build.shutil, "which", lambda _: None)
    with pytest.raises(NotCoveredError, match="no C compiler"):
        native.core_path(package)


def test_a_compiler_error_is_in_the_message(package: Path) -> None:
    (package / "csrc" / "lagrangian.c").write_text("#error broken on purpose\n", encoding="utf-8")
    with pytest.raises(NotCoveredError, match="broken on purpose"):
        native.core_path(package)


def test_too_many_kinds_of_layers_are_not_covered() -> None:
    shape = Shape(counts=(2,), layers=24, widths=4, kinds=8, memory=2.0, pairs=1)
    space = random_space(np.random.default_rng(0), replace(shape, kinds=1))
    many = np.arange(24, dtype=np.int64) % 8
    pair = space.pairs[0]
    wide = {
        name: np.repeat(getattr(pair, name), 8, axis=1)
        for name in ("prefill_s", "decode_s", "layer_bytes", "host_bytes", "stream_bytes")
    }
    spread = replace(pair, **wide, kv_bytes=np.zeros(8, dtype=np.int64))
    assert solve_exact(replace(space, pairs=(spread,), kinds=many), orders="types").value_s > 0
    every = np.concatenate([many, many, many, many])
    omega = np.concatenate([space.omega] * 4)
    large = replace(space, pairs=(spread,), kinds=every, omega=omega)
    with pytest.raises(NotCoveredError, match="ways to count a stage"):
        solve_exact(large, orders="types")


def test_memory_that_nothing_fits_in_is_infeasible() -> None:
    space = random_space(np.random.default_rng(0), Shape(memory=0.01))
    with pytest.raises(InfeasibleError, match="no plan fits in memory"):
        solve_exact(space, orders="types")


def test_a_budget_that_nothing_meets_is_infeasible() -> None:
    space = random_space(np.random.default_rng(0), Shape(memory=0.5))
    with pytest.raises(InfeasibleError, match="quality budget"):
        solve_exact(replace(space, quality_budget=0.0), orders="types")


def test_without_time_left_no_compiler_is_started(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_build.subprocess, "Popen", None)
    with pytest.raises(NotCoveredError, match="no time to compile"):
        native.core_path(package, limit_s=0.0)


def test_a_kept_core_needs_no_time(package: Path) -> None:
    assert native.core_path(package) == native.core_path(package, limit_s=-1.0)


def test_a_compiler_that_takes_too_long_ends_with_all_its_parts(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "cc"
    pid = tmp_path / "cc.pid"
    slow.write_text(
        '#!/bin/sh\nsleep 600 &\ntouch "$TMPDIR/rest"\n'
        f"echo $! > {pid}.part\nmv {pid}.part {pid}\nwait\n"
    )
    slow.chmod(0o755)
    monkeypatch.setattr(native_build.shutil, "which", lambda _: str(slow))
    # Time passes once the compiler has started a process of its own.
    clock = SimpleNamespace(monotonic=lambda: float(pid.exists()), sleep=time.sleep)
    monkeypatch.setattr(native_build, "time", clock)
    with pytest.raises(NotCoveredError, match=r"took over 0\.5 s"):
        native.core_path(package, limit_s=0.5)
    part = int(pid.read_text())
    wait_for(lambda: is_running(part), lambda alive: not alive)
    assert list((package / "__pycache__").iterdir()) == []
