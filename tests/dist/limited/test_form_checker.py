"""Forms of attacks and of users, compiled in a child process."""

from __future__ import annotations

import asyncio
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


def test_answers_of_one_form_are_compiled_once(monkeypatch):
    library = structured_outputs._library()
    compiled = []

    class Counted:
        def __getattr__(self, name):
            if name == "LLMatcher":
                compiled.append(name)
            return getattr(library, name)

    form = StructuredOutputsParams(choice=("yes", "no"))
    structured_outputs.grammar_of(form)
    monkeypatch.setattr(structured_outputs, "_library", Counted)
    compiler = structured_outputs.GrammarCompiler(DEMO, ())
    first, *others = [compiler.compile(form) for _ in range(8)]
    assert len(compiled) == 1
    before = first.allowed(4096)
    first.accept(int(before.argmax()))
    for other in others:
        assert (other.allowed(4096) == before).all()
