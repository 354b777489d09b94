"""The C files of a native library depend on each other in one direction."""

from __future__ import annotations

import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "llmpq"
FOLDERS = sorted({path.parent for path in PACKAGE.rglob("csrc/*.c")})

COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
DIRECTIVE = re.compile(r"^[ \t]*#(?:.*\\\n)*.*", re.MULTILINE)
# A function that other files may call begins a line, and is neither static nor a type.
_BEGIN = r"^(?!static\b|typedef\b|INLINE\b)[A-Za-z_][\w \t*]*?\b(\w+)\s*\([^;{}]*\)\s*"
DECLARED = re.compile(_BEGIN + ";", re.MULTILINE)
DEFINED = re.compile(_BEGIN + r"\{", re.MULTILINE)


def code(path: Path) -> str:
    """Return a file without comments and directives."""
    return DIRECTIVE.sub("", COMMENT.sub("", path.read_text(encoding="utf-8")))


def uses(folder: Path) -> dict[str, set[str]]:
    """Return the C files that each C file calls into, through what headers declare."""
    declared = {name for path in folder.glob("*.h") for name in DECLARED.findall(code(path))}
    texts = {path.name: code(path) for path in folder.glob("*.c")}
    home: dict[str, str] = {}
    for file, text in texts.items():
        for name in declared.intersection(DEFINED.findall(text)):
            assert home.setdefault(name, file) == file, f"{name} is defined twice"
    assert declared == set(home), f"{folder}: declared, but not found: {declared - set(home)}"
    words = {file: set(re.findall(r"\w+", text)) for file, text in texts.items()}
    return {
        file: {home[name] for name in declared & found if home[name] != file}
        for file, found in words.items()
    }


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.parent.name)
def test_no_c_files_depend_on_each_other_in_a_circle(folder):
    TopologicalSorter(uses(folder)).prepare()


def test_the_graph_has_the_calls_that_are_known():
    kernels = uses(PACKAGE / "kernels" / "cpu" / "csrc")
    assert {"parts.c", "prefill_attention.c", "store.c"} <= kernels["attention.c"]
    assert "panel_float.c" in kernels["panel_bf16.c"]
    assert "labels.c" in uses(PACKAGE / "assigner" / "exact" / "csrc")["search.c"]


def test_a_circle_is_found(tmp_path):
    (tmp_path / "both.h").write_text("/* int none(int); */\nint one(int x);\nint two(int x);\n")
    (tmp_path / "one.c").write_text('#include "both.h"\nint one(int x) {\n    return two(x);\n}\n')
    (tmp_path / "two.c").write_text("int two(int x) {\n    return x ? one(x - 1) : 0;\n}\n")
    with pytest.raises(CycleError):
        TopologicalSorter(uses(tmp_path)).prepare()
