"""Where compiled libraries are kept: folders that are ours, and that may run code."""

from __future__ import annotations

import os
import tempfile
from types import SimpleNamespace

import pytest

from llmpq import native_build
from llmpq.native_build import NotCompiledError, library_path


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with one C source, beside an empty temporary folder."""
    folder = tmp_path / "package"
    (folder / "csrc").mkdir(parents=True)
    (folder / "csrc" / "one.c").write_text("int one(void) { return 1; }\n")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(native_build, "_compile", lambda _flags, _units, target, _s: target.touch())
    return folder


def without_execution(*folders):
    """``statvfs`` of a host whose file systems of these folders run no programs."""

    def statvfs(folder):
        is_closed = any(folder.is_relative_to(one) for one in folders)
        return SimpleNamespace(f_flag=os.ST_NOEXEC if is_closed else 0)

    return statvfs


def test_a_library_lies_beside_its_package(package):
    assert library_path(package, "one", ()).parent == package / "__pycache__"


def test_compiling_is_announced_once(package, caplog):
    for _ in range(2):
        library_path(package, "one", ())
    assert caplog.messages == ["compiling C code (one), once: it takes seconds"]


def test_a_library_of_other_instructions_has_another_name(package):
    # Hosts with other processors may share the folder.
    paths = {library_path(package, "one", (flag,)) for flag in ("-mavx2", "-mavx512f")}
    assert len(paths) == 2


def test_a_file_system_that_runs_no_programs_is_passed_over(package, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", without_execution(package))
    assert library_path(package, "one", ()).is_relative_to(tmp_path / "temporary")
    monkeypatch.setattr(os, "statvfs", without_execution(tmp_path))
    with pytest.raises(NotCompiledError, match="no writable folder"):
        library_path(package, "one", ())


def test_a_container_without_a_temporary_folder_is_one_case_of_it(package, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    assert library_path(package, "one", ()).parent == package / "__pycache__"
    monkeypatch.setattr(os, "statvfs", without_execution(package))
    with pytest.raises(NotCompiledError, match="no writable folder"):
        library_path(package, "one", ())
