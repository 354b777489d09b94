"""A run of the whole suite collects every test file."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
RUN_BY_A_TEST = {
    "paged_decode_interpreted.py",
    "rows_interpreted.py",
    "triton_decode_interpreted.py",
    "triton_interpreted.py",
    "triton_mixers_interpreted.py",
}
"""Files with tests that another test runs in a process of its own."""


def test_no_folder_of_tests_is_left_out(pytestconfig):
    # pytest's own default leaves out folders named dist or build, without a word.
    folders = {path.parent for path in TESTS.rglob("test_*.py")}
    assert TESTS / "dist" in folders
    parts = {part for folder in folders for part in folder.relative_to(TESTS).parts}
    patterns = pytestconfig.getini("norecursedirs")
    assert not [part for part in parts for pattern in patterns if fnmatch(part, pattern)]


def test_test_files_have_names_that_pytest_collects(pytestconfig):
    patterns = pytestconfig.getini("python_files")
    with_tests = [
        path
        for path in TESTS.rglob("*.py")
        if any(line.startswith("def test_") for line in path.read_text("utf-8").splitlines())
    ]
    assert with_tests
    missed = {path.name for path in with_tests if not any(fnmatch(path.name, p) for p in patterns)}
    assert missed == RUN_BY_A_TEST
