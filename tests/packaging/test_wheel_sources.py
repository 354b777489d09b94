"""What a wheel is built from, in a checkout and where git is not installed."""

from __future__ import annotations

import subprocess

from helpers.docs_pages import ROOT

from scripts import build_wheel


def test_sources_without_git_are_those_of_the_checkout(monkeypatch, tmp_path):
    listed = subprocess.run(
        ["git", "ls-files", "llmpq", "scripts", "pyproject.toml"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    monkeypatch.setattr(build_wheel, "tracked_files", lambda: None)
    build_wheel.copy_sources(tmp_path / "tree")
    assert [name for name in listed if not (tmp_path / "tree" / name).is_file()] == []
    assert not (tmp_path / "tree" / ".venv").exists()
    assert not (tmp_path / "tree" / ".git").exists()
