"""What the documentation names exists: files, modules, tests, commands; and it stays short."""

from __future__ import annotations

import ast
import json
import re
from functools import cache

import pytest
from helpers.docs_pages import PAGES, ROOT, name_of

MAX_WORDS = 17_966
"""Of all pages that have no bound of their own, with the changelog."""
MAX_WORDS_OF = {
    "docs/evidence/larry.md": 300,
    "docs/evidence/multibin.md": 260,
    "docs/evidence/online.md": 250,
    "docs/evidence/sal.md": 320,
    "docs/evidence/samullm.md": 536,
    "docs/evidence/speed.md": 330,
    "docs/how/applications.md": 330,
    "docs/how/draft-models.md": 480,
    "docs/how/equations.md": 1_790,
    "docs/how/fleets.md": 750,
    "docs/how/head.md": 350,
    "docs/how/host-experts.md": 580,
    "docs/how/mtp.md": 300,
    "docs/how/speculation.md": 400,
    "docs/how/start.md": 230,
    "docs/install/first-answer.md": 350,
    "docs/operations/kubernetes.md": 170,
    "docs/operations/ray.md": 260,
    "docs/reference/api.md": 700,
    "docs/reference/applications.md": 500,
    "docs/reference/checkpoints.md": 300,
    "docs/reference/devices.md": 700,
    "docs/reference/models.md": 330,
    "docs/tutorials/applications.md": 480,
    "docs/tutorials/export.md": 270,
    "docs/tutorials/serve.md": 550,
}
"""Of the pages of capabilities that were added since: each page, and its own bound."""
FOLDERS = (
    "benchmarks",
    "docs",
    "inputs",
    "llmpq",
    "models",
    "notebooks",
    "reproduce",
    "scripts",
    "strategies",
    "tests",
    "tools",
)
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./*-]*")
DEFINED = re.compile(r"^ *(?:def|class) (\w+)|^ *(\w+): [A-Za-z]", re.M)
"""Functions, classes, and fields."""
MODULE = re.compile(r"llmpq(?:\.\w+)+")
OLD_NAMES = {"CHANGELOG.md"}
"""Pages that name what no longer exists."""


def code_of(page):
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return [found.strip() for found in CODE.findall(text)]


@cache
def names_of_tests():
    names = set()
    for path in (ROOT / "tests").rglob("*.py"):
        names.add(path.stem)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_exist(page):
    named = [code for code in code_of(page) if FILE.fullmatch(code)]
    assert not [code for code in named if not any(ROOT.glob(code.rstrip("/")))]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if name_of(page) not in OLD_NAMES], ids=name_of
)
def test_modules_and_their_names_exist(page):
    missing = [code for code in code_of(page) if MODULE.fullmatch(code) and not exists(code)]
    assert not missing


def exists(dotted):
    """Whether a dotted name is a module, or something defined in one."""
    path = ROOT.joinpath(*dotted.split("."))
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    module, _, name = dotted.rpartition(".")
    found = ROOT.joinpath(*module.split("."))
    file = found / "__init__.py" if found.is_dir() else found.with_suffix(".py")
    return (
        file.is_file() and re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")) is not None
    )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tests_exist(page):
    named = {code for code in code_of(page) if re.fullmatch(r"test_\w+", code)}
    assert named <= names_of_tests()


def test_tests_of_public_reports_exist():
    """A test that was moved must not leave a report behind that nothing holds."""
    cases = json.loads((ROOT / "benchmarks" / "cases.json").read_text(encoding="utf-8"))
    named = {test for case in cases for test in case["tests"]}
    missing = []
    for test in named:
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else ""
        if f"def {name or 'test_'}" not in text:
            missing.append(test)
    assert named
    assert not missing


@cache
def names_of_sources():
    names = set()
    for folder in ("llmpq", "reproduce", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            found = DEFINED.findall(path.read_text(encoding="utf-8"))
            names |= {name for pair in found for name in pair if name}
    return names


def rows_of_equations():
    """Return paper, functions, tests and deviation of each row of the page of equations."""
    text = (ROOT / "docs" / "how" / "equations.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows if not set(row[0].strip()) <= {"-"}]


def test_every_equation_has_a_function_and_a_test():
    for paper, function, test, deviation in rows_of_equations():
        if (paper, function, test, deviation) == ("paper", "function", "test", "deviation"):
            continue
        named = CODE.findall(function)
        assert named, paper
        for name in named:
            if not FILE.fullmatch(name) and not MODULE.fullmatch(name) and name[0] != "-":
                assert set(name.split(".")) <= names_of_sources(), name
        assert [name for name in CODE.findall(test) if name.startswith("test_")], paper
        assert deviation, paper


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_and_their_options_exist(page):
    surface = (ROOT / "tests" / "architecture" / "cli_surface.txt").read_text(encoding="utf-8")
    options = set(re.findall(r"--[\w-]+", surface))
    commands = set(re.findall(r"^llmpq-\w+", surface, re.M))
    text = " ".join(code_of(page))
    assert set(re.findall(r"\bllmpq-[a-z]\w*", text)) <= commands
    named = {
        option
        for code in code_of(page)
        if code.startswith("--")
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]+", code)
    }
    assert named <= options | FOREIGN_OPTIONS


FOREIGN_OPTIONS = {
    "--busy", "--device", "--links", "--list", "--max-restarts", "--only", "--rpc", "--small",
    "--tensor-split",
}  # fmt: skip
"""Of scripts, torchrun and llama.cpp."""


def words_of(page):
    return len(re.findall(r"\S*\w\S*", page.read_text(encoding="utf-8")))


def test_documentation_stays_short():
    words = {name_of(page): words_of(page) for page in PAGES if name_of(page) not in MAX_WORDS_OF}
    assert sum(words.values()) <= MAX_WORDS, words


@pytest.mark.parametrize("page", MAX_WORDS_OF)
def test_pages_of_added_capabilities_stay_short(page):
    assert words_of(ROOT / page) <= MAX_WORDS_OF[page]
