"""Every finished answer of a given form has that form, whatever the model's scores are."""

from __future__ import annotations

import json
import math
import re
import sys

import pytest
import torch
from helpers.byte_tokenizer import EOS, TOKENS, text_of, write_byte_tokenizer
from helpers.sampled import sampled
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.dist.engine.engine import SamplingState
from llmpq.dist.io.sampling_params import SamplingParams, StructuredOutputsParams
from llmpq.dist.io.structured_outputs import GrammarCompiler, grammar_of
from llmpq.errors import SpecError

pytest.importorskip("llguidance")
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory) -> GrammarCompiler:
    return GrammarCompiler(write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")), [EOS])


def answer(
    compiler: GrammarCompiler, form: StructuredOutputsParams, seed: int, most: int = 400
) -> str | None:
    """Return an answer of random scores, ``None`` if it is not finished in time."""
    generator = torch.Generator().manual_seed(seed)
    params = SamplingParams(temperature=1.0, seed=seed, structured_outputs=form)
    state = SamplingState(params, stop_token_ids=[EOS], matcher=compiler.compile(form))
    closing = [TOKENS.index(token) for token in ('"', "}", "]", '"}', "<eos>")]
    for _ in range(most):
        logits = torch.randn(1, len(TOKENS) + 3, generator=generator)
        logits[0, closing] += 4  # else texts and lists hardly end
        token = sampled(logits, [state])[0]
        assert token.error is None
        assert token.token_id < len(TOKENS)
        state.accept(token.token_id)
        if token.token_id == EOS or state.is_complete:
            return text_of(state.token_ids)
    return None


def test_a_complete_form_does_not_end_with_a_stop_token(compiler):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["aa"]))
    states = [
        SamplingState(params, stop_token_ids=[EOS], matcher=compiler.compile(form))
        for form in (params.structured_outputs, StructuredOutputsParams(regex="a*"))
    ]
    for state, tokens in zip(states, ([TOKENS.index("a")] * 2, [EOS]), strict=True):
        for token in tokens:
            state.accept(token)
        assert state.finish_reason(10) == "stop"
    assert [state.ends_with_stop_token for state in states] == [False, True]


SCHEMAS = st.recursive(
    st.one_of(
        st.builds(dict, type=st.sampled_from(["boolean", "null", "string", "integer"])),
        st.builds(
            lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
            st.integers(-50, 50),
            st.integers(0, 30),
        ),
        st.builds(
            lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
            st.integers(0, 4),
            st.integers(0, 4),
        ),
        st.builds(
            lambda values: {"enum": values},
            st.lists(st.sampled_from(["a", "true", "ü", 3, None, False]), min_size=1, unique=True),
        ),
    ),
    lambda inner: st.one_of(
        st.builds(
            lambda item, low, more: {
                "type": "array", "items": item, "minItems": low, "maxItems": low + more
            },
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.builds(
            lambda fields, required: {
                "type": "object",
                "properties": fields,
                "required": [name for name in fields if name in required],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["a", "b", "long name", "ü"]), inner, max_size=3),
            st.sets(st.sampled_from(["a", "b", "long name", "ü"])),
        ),
    ),
    max_leaves=5,
)  # fmt: skip


OBJECT = {
    "type": "object",
    "properties": {name: {"type": "integer", "minimum": 1, "maximum": 9} for name in ("a", "b")},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def token_of(letter: str) -> int:
    """Return the token of a letter; the byte-level alphabet writes white space otherwise."""
    return TOKENS.index({" ": "\u0120", "\n": "\u010a", "\t": "\u0109"}.get(letter, letter))


def is_valid(value: object, schema: dict[str, object]) -> bool:
    """Whether a value has the schema, for the words that are used above."""
    if "enum" in schema:
        return any(type(value) is type(one) and value == one for one in schema["enum"])
    kind = schema["type"]
    if kind == "object":
        return (
            isinstance(value, dict)
            and all(name in schema["properties"] for name in value)
            and all(name in value for name in schema["required"])
            and all(is_valid(item, schema["properties"][name]) for name, item in value.items())
        )
    if kind == "array":
        low, high = schema["minItems"], schema["maxItems"]
        is_list = isinstance(value, list) and low <= len(value) <= high
        return is_list and all(is_valid(item, schema["items"]) for item in value)
    if kind == "string":
        length = len(value) if isinstance(value, str) else -1
        return schema.get("minLength", 0) <= length <= schema.get("maxLength", math.inf)
    if kind == "integer":
        is_number = isinstance(value, int) and not isinstance(value, bool)
        low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
        return is_number and low <= value <= high
    return value is None if kind == "null" else isinstance(value, bool)


@settings(max_examples=60)
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_finished_answers_have_the_schema(compiler, schema, seed):
    found = answer(compiler, StructuredOutputsParams(json=json.dumps(schema)), seed)
    assert found is None or is_valid(json.loads(found), schema)


@pytest.mark.parametrize("form", [{"json": json.dumps(OBJECT)}, {"json_object": True}])
def test_white_space_does_not_go_on_for_ever(compiler, form):
    """The scores of some models are best for white space as long as it may come."""
    found = StructuredOutputsParams(**form)
    params = SamplingParams(structured_outputs=found)
    state = SamplingState(params, stop_token_ids=[EOS], matcher=compiler.compile(found))
    logits = torch.zeros(1, len(TOKENS))
    for rank, letter in enumerate((" ", "\n", "}", '"', "a", ":", "1")):
        logits[0, token_of(letter)] = 20.0 - rank
    reason = None
    while reason is None:
        (token,) = sampled(logits, [state])
        assert token.error is None
        state.accept(token.token_id)
        reason = state.finish_reason(1000)
    assert reason == "stop"
    assert isinstance(json.loads(text_of(state.token_ids)), dict)


def test_json_may_be_indented(compiler):
    form = StructuredOutputsParams(json=json.dumps(OBJECT))
    for indent in (None, 2, "\t"):
        matcher = compiler.compile(form)
        for letter in json.dumps({"a": 1, "b": 2}, indent=indent):
            assert matcher.allowed(len(TOKENS))[token_of(letter)], (indent, letter)
            matcher.accept(token_of(letter))
        assert matcher.is_complete


@pytest.mark.parametrize(
    "form",
    [
        {"regex": r"[a-c]{2,4}-(x|yy)?"},
        {"regex": r"[0-9]+\.[0-9]{2}"},
        {"choice": ["yes", "no", "maybe", "ü n", 'a"b\\c']},
        {"grammar": 'start: "a" start "b" | "c"'},
        {"grammar": 'root ::= "c" | "a" root "b"'},
        {"json_object": True},
    ],
)
def test_finished_answers_have_the_form(compiler, form):
    finished = 0
    for seed in range(12):
        found = answer(compiler, StructuredOutputsParams(**form), seed)
        if found is None:
            continue
        finished += 1
        if "regex" in form:
            assert re.fullmatch(form["regex"], found)
        elif "choice" in form:
            assert found in form["choice"]
        elif "grammar" in form:
            assert re.fullmatch(r"a*cb*", found)
            assert found.count("a") == found.count("b")
        else:
            assert isinstance(json.loads(found), dict)
    assert finished >= 6


@pytest.mark.parametrize(
    "form",
    [
        {"json": "{"},
        {"json": "[]"},
        {"json": '{"type": "no such type"}'},
        {"regex": "(a"},
        {"grammar": "start: unknown_rule"},
        {"grammar": "}{"},
        {"json": '{"x": "' + "y" * (1 << 20) + '"}'},
    ],
)
def test_a_form_that_is_not_valid_is_an_error_of_the_request(form):
    with pytest.raises(SpecError, match="structured_outputs"):
        grammar_of(StructuredOutputsParams(**form))


def test_a_recomputed_answer_goes_on_at_the_same_place(compiler):
    form = StructuredOutputsParams(regex="abcabc")
    params = SamplingParams(structured_outputs=form)
    state = SamplingState(params, matcher=compiler.compile(form))
    for letter in "abca":
        state.accept(TOKENS.index(letter))
    again = SamplingState(params, matcher=compiler.compile(form), token_ids=state.token_ids)
    logits = torch.zeros(1, len(TOKENS))
    assert sampled(logits, [again])[0].token_id == TOKENS.index("b")
    for letter in "bc":
        assert not again.is_complete
        again.accept(TOKENS.index(letter))
    assert again.is_complete


def test_a_token_that_may_not_come_next_leaves_no_token(compiler):
    form = StructuredOutputsParams(choice=["a"])
    params = SamplingParams(structured_outputs=form)
    state = SamplingState(params, matcher=compiler.compile(form), token_ids=[TOKENS.index("z")])
    assert sampled(torch.zeros(1, len(TOKENS)), [state])[0].error is not None


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    grammar_of.cache_clear()
    with pytest.raises(SpecError, match=re.escape("llmpq[structured]")):
        grammar_of(StructuredOutputsParams(choice=["a"]))


def test_without_a_fast_tokenizer_the_file_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"tokenizer\.json"):
        GrammarCompiler(tmp_path, [EOS]).compile(StructuredOutputsParams(choice=["a"]))
