"""What the package must never do, read off its syntax trees (docs/operations/hosts.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "llmpq"
SOURCES = sorted(PACKAGE.rglob("*.py"))
FORBIDDEN_IMPORTS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {
    ("torch", "load"),
    ("torch", "save"),
    ("np", "load"),
    ("dist", "send_object_list"),
    ("dist", "recv_object_list"),
    ("dist", "broadcast_object_list"),
    ("dist", "all_gather_object"),
}


def imported_names(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_code_runs_from_data(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = imported_names(tree)
    assert not {name.split(".")[0] for name in names} & FORBIDDEN_IMPORTS
    assert "torch.distributed.rpc" not in names
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name):
            assert function.id not in FORBIDDEN_CALLS, f"{path}:{node.lineno}"
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            assert (function.value.id, function.attr) not in FORBIDDEN_ATTRIBUTES
        for keyword in node.keywords:
            true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            assert not (keyword.arg in {"shell", "trust_remote_code"} and true), path


def test_modules_stay_within_their_size():
    """One idea a module: 1,000 lines at most (CONTRIBUTING.md)."""
    long = {str(path): n for path in SOURCES if (n := len(path.read_text().splitlines())) > 1000}
    assert not long
