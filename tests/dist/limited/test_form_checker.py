"""Forms of attacks and of users, compiled in a child process."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
from pathlib import Path

import pytest
from helpers.clocks import PATIENCE_S

from llmpq.dist.io import structured_outputs
from llmpq.dist.io.sampling_params import StructuredOutputsParams
from llmpq.dist.limited.form_checker import FormChecker
from llmpq.errors import SpecError

pytest.importorskip("llguidance")
ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "models" / "demo"
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture
def checker(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = FormChecker(DEMO, 1.0)
    yield found
    found.close()


def check(checker, *forms):
    async def scenario():
        for form in forms:
            await checker.check(form)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_ordinary_forms_pass(checker):
    check(
        checker,
        StructuredOutputsParams(json=OBJECT),
        StructuredOutputsParams(regex=r"\d{3}"),
        StructuredOutputsParams(choice=("yes", "no")),
        StructuredOutputsParams(json_object=True),
        StructuredOutputsParams(json={"type": "integer", "multipleOf": 5}),
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 121330189},
        {"allOf": [{"type": "integer", "multipleOf": k} for k in (101, 103, 107, 109)]},
        {"enum": [{"a": [i, {"b": i}]} for i in range(20_000)]},
    ],
)
def test_forms_that_take_too_long_or_too_much_are_refused(checker, schema):
    form = StructuredOutputsParams(json=schema)
    with pytest.raises(SpecError, match="expected a simpler") as found:
        check(checker, form)
    assert "backtrace" not in str(found.value)
    check(checker, StructuredOutputsParams(json=OBJECT))
    checker.close()  # the result is kept
    with pytest.raises(SpecError, match="expected a simpler"):
        check(checker, form)


def test_forms_that_are_not_valid_are_refused(checker):
    for form in (
        StructuredOutputsParams(regex="(a"),
        StructuredOutputsParams(json=json.dumps({"type": "no such type"})),
        StructuredOutputsParams(choice=("",)),
    ):
        with pytest.raises(SpecError):
            check(checker, form)


def test_a_model_without_a_fast_tokenizer_has_no_forms(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    checker = FormChecker(tmp_path, 2.0)
    with pytest.raises(SpecError, match=r"tokenizer\.json"):
        check(checker, StructuredOutputsParams(json=OBJECT))
    checker.close()


@pytest.fixture
def compiled(monkeypatch):
    """Return a list that gets an item for each form that is compiled."""
    library = structured_outputs._library()
    found = []

    class Counted:
        def __getattr__(self, name):
            if name == "LLMatcher":
                found.append(name)
            return getattr(library, name)

    monkeypatch.setattr(structured_outputs, "_library", Counted)
    return found


def test_answers_of_one_form_are_compiled_once(compiled):
    form = StructuredOutputsParams(choice=("yes", "no"))
    structured_outputs.grammar_of(form)
    compiled.clear()
    compiler = structured_outputs.GrammarCompiler(DEMO, ())
    first, *others = [compiler.compile(form) for _ in range(8)]
    assert len(compiled) == 1
    before = first.allowed(4096)
    first.accept(int(before.argmax()))
    for other in others:
        assert (other.allowed(4096) == before).all()


@pytest.mark.parametrize("grows", [0, structured_outputs.LARGE_FORM_BYTES + 1])
def test_a_large_form_is_kept_only_while_an_answer_has_it(monkeypatch, compiled, grows):
    sizes, returned = itertools.count(0, grows), []
    monkeypatch.setattr(structured_outputs, "resident_bytes", lambda: next(sizes))
    monkeypatch.setattr(structured_outputs, "return_freed_memory", lambda: returned.append(None))
    form = StructuredOutputsParams(choice=("yes", "no"))
    structured_outputs.grammar_of(form)
    compiled.clear()
    compiler = structured_outputs.GrammarCompiler(DEMO, ())
    first = compiler.compile(form)
    second = compiler.compiled(form).copy()
    del first
    gc.collect()
    assert compiler.compiled(form) is not None  # the second answer has it
    assert not returned
    del second
    gc.collect()
    assert (compiler.compiled(form) is None) == bool(grows)
    assert len(returned) == bool(grows)
    compiler.compile(form)
    assert len(compiled) == 1 + bool(grows)
