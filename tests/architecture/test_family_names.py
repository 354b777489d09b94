"""All that is known of a model family stands in its own file; the code names it nowhere else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from llmpq.spec import families
from llmpq.spec.families import family_of

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(families.__file__).parent
RECORDS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
KINDS_OF_LAYERS = {"mamba", "mamba2"}
"""Families of such layers alone; others have them too."""
OTHER_PROGRAM = re.compile(r"llama[-_.](?:cpp|quantize|server)|llama\.cpp")
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+")


def names() -> frozenset[str]:
    """Return the names of families, and of llama.cpp's architectures, without punctuation."""
    forms = [family_of(name).gguf for name in RECORDS]
    found = {*RECORDS, *(form.architecture for form in forms if form is not None)}
    return frozenset(name.replace("_", "") for name in found)


def texts(tree: ast.AST) -> Iterator[str]:
    """Yield the identifiers and the string constants of a module, but no docstrings."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in documentation:
            yield str(node.value)
        for field in ("id", "attr", "name", "module", "arg"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield value


@cache
def named(text: str, known: frozenset[str]) -> frozenset[str]:
    """Return the families that a text names, as words of their own."""
    words = [word.lower() for word in WORD.findall(OTHER_PROGRAM.sub("", text))]
    runs = ("".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, i + 5))
    return known & frozenset(runs)


def test_code_names_no_family_outside_its_own_file():
    known, found = names() - KINDS_OF_LAYERS, {}
    for path in (ROOT / "llmpq").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        own = set[str]().union(*(named(text, known) for text in set(texts(tree))))
        if own and path.parent != FOLDER:
            found[str(path.relative_to(ROOT))] = own
    assert found == {}


@pytest.mark.parametrize("model_type", RECORDS)
def test_a_file_has_the_name_of_its_record_or_the_record_of_another_file(model_type):
    name = family_of(model_type).name
    assert name == model_type or (name in RECORDS and family_of(name).name == name)


def test_a_model_type_without_a_file_has_the_defaults():
    assert not family_of("unheard_of").is_tested
    assert family_of("../plan").sizes is None
    assert family_of("__init__").sizes is None
