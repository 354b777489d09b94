"""Answers of a form hold calls whose arguments satisfy the schemas of their functions."""

from __future__ import annotations

import json
import random
from functools import cache
from types import SimpleNamespace

import jsonschema_rs
import llguidance
import numpy as np
import pytest
from helpers.served import DEMO
from model_templates import MODELS, TOOLS, format_of
from tokenizers import Tokenizer

from llmpq.dist.io.sampling_params import StructuredOutputsParams
from llmpq.dist.io.structured_outputs import grammar_of
from llmpq.errors import SpecError
from llmpq.server.tools import AnswerParts, PreparedTools, prepare
from llmpq.server.tools.grammar import enforceable

VOCAB, EOS = 4096, 1
FREE = 1000
"""More tokens that may come next than any form but free text allows."""
ORDER = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b c"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 20},
        "on": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 1, "maxItems": 2},
        "who": {"$ref": "#/$defs/who"},
        "note": {"type": "string", "maxLength": 4},
        "level": {"type": ["integer", "null"], "minimum": 0, "maximum": 3},
    },
    "required": ["kind", "count", "who"],
    "additionalProperties": False,
    "$defs": {
        "who": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 3}, "old": {"const": True}},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}


class Vocabulary:
    """The demo's tokens, and further special ones."""

    def __init__(self, special: tuple[str, ...]) -> None:
        content = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
        self.special = {text: VOCAB + place for place, text in enumerate(special)}
        sample = content["added_tokens"][0]
        content["added_tokens"] += [
            {**sample, "id": id, "content": text} for text, id in self.special.items()
        ]
        self.rust = llguidance.LLTokenizer(json.dumps(content), eos_token=[EOS])
        self.tokenizer = Tokenizer.from_str(json.dumps(content))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        form = grammar_of(StructuredOutputsParams(grammar=grammar))
        matcher = llguidance.LLMatcher(self.rust, form, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def accepts(self, grammar: str, text: str) -> bool:
        matcher, ids = self.matcher(grammar), self.encode(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@cache
def vocabulary(special: tuple[str, ...]) -> Vocabulary:
    return Vocabulary(special)


def prepared(name: str, tools=TOOLS, choice="required", parallel=True) -> PreparedTools:
    body = SimpleNamespace(
        messages=[{"role": "user", "content": "hi"}],
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
    )
    return prepare(body, format_of(MODELS[name].source))


def opening(name: str) -> str:
    """Return the end of a prompt of a model."""
    reasoning = format_of(MODELS[name].source).reasoning
    return reasoning.open if reasoning is not None and MODELS[name].is_opened else ""


def strict(schema, name: str = "order"):
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}


def choose(matcher, source: random.Random, closers: list[list[int]]) -> list[int]:
    """Return tokens that may come next; free text ends soon."""
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
    if len(allowed) > FREE and source.random() < 0.5:
        for ids in closers:
            if matcher.validate_tokens(ids) == len(ids):
                return ids
    others = [token for token in allowed if token != EOS]
    return [source.choice(others)] if others and EOS not in allowed else [EOS]


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_the_answers_of_a_model_have_the_form(name, is_special):
    model = MODELS[name]
    words = vocabulary(model.special if is_special or name == "harmony" else ())
    prompt = "" if name == "harmony" else "x"
    grammar = prepared(name).grammar(prompt, words.special)
    assert words.accepts(grammar, model.one)
    assert not words.accepts(grammar, "Hello")
    assert not words.accepts(grammar, model.one.replace("get_weather", "get_whether"))
    if model.both is not None and name != "harmony":
        assert words.accepts(grammar, model.both)
        single = prepared(name, parallel=False).grammar(prompt, words.special)
        assert not words.accepts(single, model.both)
    only = {"type": "function", "function": {"name": "get_time"}}
    assert not words.accepts(prepared(name, choice=only).grammar(prompt, words.special), model.one)


FORMS = {
    "json": (StructuredOutputsParams(json={"type": "object", "properties": {"a": {"enum": ["/\n"]}},
                                           "required": ["a"]}), '{"a":"/\\n"}', '{"a":"x"}'),
    "regex": (StructuredOutputsParams(regex=r"a/b\n\d+"), "a/b\n12", "a/b\n"),
    "escaped": (StructuredOutputsParams(regex=r"https?:\/\/\w\d"), "https://a1", "https:/a1"),
    "choice": (StructuredOutputsParams(choice=("yes", 'n"o\n')), 'n"o\n', "ye"),
    "object": (StructuredOutputsParams(json_object=True), '{"b": [1]}', "[1]"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name].thinking])
def test_a_form_holds_behind_the_reasoning(name, kind):
    model, words = MODELS[name], vocabulary(MODELS[name].special)
    params, right, wrong = FORMS[kind]
    tools = prepared(name, tools=(), choice="auto")
    grammar = tools.form_grammar(params, opening(name), words.special)
    before = model.thinking.removesuffix("<|return|>").removesuffix("Hello")
    assert words.accepts(grammar, before + right)
    assert not words.accepts(grammar, before + wrong)
    assert not words.accepts(grammar, before + right + "more")
    if name != "harmony":
        assert words.accepts(grammar, right) != model.is_opened
    parts = AnswerParts()
    parser = tools.parser(opening(name))
    parts.add([*parser.feed(before + right), *parser.finish()])
    assert (parts.text.strip(), parts.reasoning.strip()) == (right.strip(), "Hm.")


def test_a_grammar_and_a_model_without_reasoning_keep_their_form():
    whole = StructuredOutputsParams(grammar='start: "a"')
    assert prepared("nemotron", (), "auto").form_grammar(whole, "<think>\n", {}) is None
    form = FORMS["json"][0]
    assert prepared("llama3", (), "auto").form_grammar(form, "", {}) is None


@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name].thinking])
def test_reasoning_may_stand_before_a_call(name):
    model, words = MODELS[name], vocabulary(MODELS[name].special)
    grammar = prepared(name).grammar(opening(name), words.special)
    before = model.thinking.removesuffix("<|return|>").removesuffix("Hello")
    if name == "harmony":
        before = before.removesuffix("<|channel|>final<|message|>")
    assert words.accepts(grammar, before + model.one)
    assert not words.accepts(grammar, model.thinking)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_arguments_of_any_answer_satisfy_the_schema(name, seed):
    model, source = MODELS[name], random.Random(seed)
    words = vocabulary(model.special)
    form = format_of(model.source)
    found = prepared(name, [strict(ORDER)])
    matcher = words.matcher(found.grammar(opening(name), words.special))
    marks = [form.reasoning.close if form.reasoning else "<|end|>"]
    marks += [form.calls.value_close, form.calls.quote, '"']
    closers = [words.encode(mark) for mark in marks if mark]
    ids: list[int] = []
    while not matcher.is_stopped() and ids[-1:] != [EOS]:
        chosen = choose(matcher, source, closers)
        assert matcher.try_consume_tokens(chosen) == len(chosen)
        ids += chosen
        assert len(ids) < 3000
    parser = found.parser(opening(name))
    parts = AnswerParts()
    parts.add([*parser.feed(words.decode([id for id in ids if id != EOS])), *parser.finish()])
    assert parts.calls
    assert parts.text == ""
    check = jsonschema_rs.validator_for(ORDER)
    for call in parts.calls:
        assert call["function"]["name"] == "order"
        check.validate(json.loads(call["function"]["arguments"]))


@pytest.mark.parametrize("name", MODELS)
def test_a_strict_function_has_the_form_from_where_its_call_begins(name):
    model, words = MODELS[name], vocabulary(MODELS[name].special)
    tools = [strict(tool["function"]["parameters"], tool["function"]["name"]) for tool in TOOLS]
    assert prepared(name, choice="auto").grammar("", words.special) is None
    grammar = prepared(name, tools, choice="auto").grammar("", words.special)
    text = "<|channel|>final<|message|>Hello" if name == "harmony" else "Hello { there"
    assert words.accepts(grammar, text)
    assert words.accepts(grammar, model.one)
    assert not words.accepts(grammar, model.one.replace("city", "town"))
    if name not in ("harmony", "llama3"):
        assert words.accepts(grammar, f"I look.\n{model.one}")
        assert not words.accepts(grammar, f"I look.\n{model.one.replace('city', 'town')}")


@pytest.mark.parametrize("slash", ["/", r"\/"])
@pytest.mark.parametrize("name", ["qwen_coder", "gemma", "qwen3"])
def test_limits_of_texts_hold_in_every_form(name, slash):
    words = vocabulary(MODELS[name].special)
    schema = {"type": "string", "pattern": f"^[A-Z]{{2}}{slash}[0-9]+$", "maxLength": 5}
    properties = {"city": schema, "days": {"type": "integer"}}
    tool = strict({"type": "object", "properties": properties}, "get_weather")
    grammar = prepared(name, [tool]).grammar("", words.special)
    answer = MODELS[name].one.replace('\\"', '"').replace('Pa\u00f1a "x"', "AB/12")
    assert words.accepts(grammar, answer)
    assert not words.accepts(grammar, answer.replace("AB/12", "AB/123"))
    assert not words.accepts(grammar, answer.replace("AB/12", "ab/12"))


def test_unknown_words_of_a_schema_are_ignored_unless_the_function_is_strict():
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "secret"}}}
    loose = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert grammar_of(StructuredOutputsParams(grammar=prepared("qwen3", [loose]).grammar("", {})))


LEVEL = {"type": "string", "enum": ["low", "high"]}
EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]"
    r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)
NOT_ENFORCED = {
    "zod's address": {"type": "string", "format": "email", "pattern": EMAIL},
    "a list of addresses": {"type": "array", "items": {"type": "string", "pattern": EMAIL}},
    "a back reference": {"type": "string", "pattern": r"(a)\1"},
    "no values": {"type": "string", "enum": []},
    "no type": {"type": None},
    "another file": {"$ref": "https://example.com/schema.json"},
}


@pytest.mark.parametrize("kind", NOT_ENFORCED)
@pytest.mark.parametrize("name", ["qwen3", "qwen_coder", "gemma", "harmony"])
def test_what_no_grammar_enforces_is_left_out_unless_the_function_is_strict(name, kind):
    """One such function would stop every request that must call any function."""
    words = vocabulary(MODELS[name].special)
    properties = {"city": NOT_ENFORCED[kind], "days": {"type": "integer"}}
    tool = strict({"type": "object", "properties": properties, "required": ["city"]}, "f")
    if name == "qwen3":
        with pytest.raises(SpecError):
            grammar_of(StructuredOutputsParams(grammar=prepared(name, [tool]).grammar("", {})))
    tool["function"]["strict"] = False
    grammar = prepared(name, [tool]).grammar(opening(name), words.special)
    assert words.matcher(grammar)


def test_words_and_names_of_schemas_are_told_apart():
    address = {"type": "string", "pattern": EMAIL}
    names = ("default", "enum", "pattern", "properties", "type")
    schema = {"properties": dict.fromkeys(names, address), "default": {"pattern": EMAIL}}
    wanted = {name: {"type": "string"} for name in names}
    assert enforceable(schema, schema) == {"properties": wanted, "default": {"pattern": EMAIL}}


@pytest.mark.parametrize("name", ["qwen_coder", "gemma", "qwen3"])
def test_references_are_followed_in_every_form(name):
    """Libraries write an enumeration, and at times all arguments, as a definition."""
    words = vocabulary(MODELS[name].special)
    properties = {"city": {"$ref": "#/$defs/a~1b"}, "days": {"type": "integer"}}
    arguments = {"type": "object", "properties": properties, "required": ["city"]}
    definitions = {"a/b": {"anyOf": [{"$ref": "#/$defs/level"}, LEVEL]}, "level": LEVEL}
    schema = {"$ref": "#/$defs/all", "$defs": {**definitions, "all": arguments}}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
    grammar = prepared(name, [tool]).grammar("", words.special)
    answer = MODELS[name].one.replace('\\"', '"').replace('Pa\u00f1a "x"', "low")
    assert words.accepts(grammar, answer)
    assert not words.accepts(grammar, answer.replace("city", "town"))
