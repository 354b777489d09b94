"""Grammars of answers whose tool calls satisfy the schemas of their functions.

The notation is llguidance's variant of Lark, which ``structured_outputs.grammar`` takes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from llmpq.dist.io.structured_outputs import lark_regex
from llmpq.server.tools.arguments import resolved, value_types
from llmpq.server.tools.call_format import ID_PLACE, CallFormat, TemplateFormat, pieces

MAX_PARALLEL_CALLS = 16
"""Most calls of one answer that must have a form."""
_MAX_DEPTH = 16
"""Of schemas whose values are not JSON."""
_MAX_JSON_DEPTH = 64
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as templates write it; free white space could go on for ever."""
_HEAD = "%llguidance {}\n"
_TERMINALS = r"""
TEXT: /(.|\n)*/
BLANKS: /\n{0,3}/
ID: /[A-Za-z0-9_\-]{1,40}/
NUMBER: /[0-9]{1,4}/
"""


_SPECIAL_LETTERS = re.compile(r"[\n.^$*+?()\[\]{}|\\/&~]")
"""That have a meaning in a regular expression."""


class CallableFunction(Protocol):
    """A function that an answer may call."""

    @property
    def name(self) -> str:
        """The name of the function."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of its arguments."""
        ...

    @property
    def is_strict(self) -> bool:
        """Whether a schema that cannot be enforced is an error."""
        ...


def answer_grammar(
    template: TemplateFormat,
    functions: Sequence[CallableFunction],
    special_tokens: Mapping[str, int],
    *,
    is_forced: bool,
    is_parallel: bool,
    is_reasoning: bool,
) -> str:
    """Return the grammar of an answer.

    Args:
        template: how calls and reasoning are written.
        functions: that may be called.
        special_tokens: of the tokenizer, by their texts.
        is_forced: whether the answer must be a call; else the form holds from where one begins.
        is_parallel: whether the answer may hold several calls.
        is_reasoning: whether the prompt has opened the reasoning.
    """
    assert template.calls is not None
    grammar = _Grammar(template.calls, special_tokens)
    if template.calls.kind == "harmony":
        return grammar.harmony(functions, is_forced=is_forced)
    inner = grammar.rule("call", " | ".join(map(grammar.call, functions)))
    start = grammar.reasoning(template, is_reasoning=is_reasoning)
    if is_forced:
        start += " " + grammar.group(inner, is_parallel=is_parallel)
    elif template.calls.is_bare:
        start += " " + grammar.bare(inner)
    else:
        start += f" ({grammar.triggered(inner)}){'*' if is_parallel else '?'} TEXT"
    return grammar.text_of(start)


def form_grammar(
    template: TemplateFormat, form: str, special_tokens: Mapping[str, int], *, is_reasoning: bool
) -> str:
    """Return the grammar of an answer that has a form behind its reasoning.

    Args:
        template: how reasoning is written.
        form: body of a rule.
        special_tokens: of the tokenizer, by their texts.
        is_reasoning: whether the prompt has opened the reasoning.
    """
    grammar = _Grammar(template.calls or CallFormat(kind="json"), special_tokens)
    rule = grammar.rule("form", form)
    if template.calls is not None and template.calls.kind == "harmony":
        return grammar.text_of(grammar.final_message(rule))
    found = template.reasoning
    assert found is not None
    before = f"{grammar.until(found.close)} BLANKS"
    if not is_reasoning:
        before = f"(BLANKS {grammar.literal(found.open)} {before})?"
    return grammar.text_of(f"{before} {rule}")


class _Grammar:
    """Collects the rules of a grammar."""

    def __init__(self, calls: CallFormat, special_tokens: Mapping[str, int]) -> None:
        self._calls = calls
        self._special = special_tokens
        self._rules: list[str] = []

    def text_of(self, start: str) -> str:
        """Return the whole grammar."""
        return "\n".join([_HEAD + f"start: {start}", *self._rules]) + _TERMINALS

    def rule(self, name: str, body: str) -> str:
        """Add a rule; return its name."""
        name = f"{name}_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Return the expression of a text, in which special tokens are one token each."""
        found = sorted(filter(text.__contains__, self._special), key=len, reverse=True)
        parts = re.split("(" + "|".join(map(re.escape, found)) + ")", text) if found else [text]
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else _quoted(part)
            for part in parts
            if part
        )

    def until(self, mark: str) -> str:
        """Return the expression of any text up to a mark, with the mark."""
        if mark in self._special:
            return f"TEXT {self.literal(mark)}"
        name = f"until_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: TEXT {_quoted(mark)}")
        return name

    def json(self, schema: Mapping[str, Any], *, is_strict: bool) -> str:
        """Return the rule of a JSON value."""
        options = _COMPACT if is_strict else _COMPACT | {"lenient": True}
        return self.rule("json", "%json " + json.dumps({**schema, "x-guidance": options}))

    def reasoning(self, template: TemplateFormat, *, is_reasoning: bool) -> str:
        """Return the expression of the reasoning before an answer."""
        found = template.reasoning
        if found is None:
            return "BLANKS"
        if is_reasoning:
            return f"{self.until(found.close)} BLANKS"
        return f"BLANKS ({self.literal(found.open)} {self.until(found.close)} BLANKS)?"

    def group(self, inner: str, *, is_parallel: bool) -> str:
        """Return the expression of an answer that is a group of calls."""
        calls = self._calls
        opened = self.literal((calls.group_open + calls.call_open).lstrip())
        again = f"{self.literal(calls.separator)} {self.literal(calls.call_open)} {inner}"
        more = f"({again}){{0,{MAX_PARALLEL_CALLS - 1}}}"
        parts = [opened, inner, more * is_parallel]
        return " ".join([*parts, self.literal(calls.group_close)])

    def triggered(self, inner: str) -> str:
        """Return the expression of text, a mark of calls and the calls behind it."""
        calls = self._calls
        opening = calls.group_open + calls.call_open
        rest = opening[opening.index(calls.trigger) + len(calls.trigger) :]
        more = f"({self.literal(calls.separator)} {self.literal(calls.call_open)} {inner})*"
        parts = [self.until(calls.trigger), self.literal(rest), inner]
        if pieces(calls.group_open) and calls.is_parallel:
            parts.append(more)
        return " ".join([*parts, self.literal(calls.group_close)])

    def bare(self, inner: str) -> str:
        """Return the expression of a call without a mark, or text that cannot be taken for one."""
        opened = self._calls.optional_open
        head = f"({self.literal(opened)})? " if opened else ""
        self._rules.append(r"PLAIN: /([^{\s](.|\n)*)?/")
        return f"({head}{inner} | PLAIN)"

    def call(self, function: CallableFunction) -> str:
        """Return the rule of a call, from its name on."""
        calls, name, schema = self._calls, function.name, _arguments_of(function)
        is_strict = function.is_strict
        if calls.kind == "object":
            parts = [self._with_ids(calls.name_open), self.literal(name + calls.name_close)]
            parts += [self.json(schema, is_strict=is_strict), self._with_ids(calls.object_close)]
        elif calls.kind == "tags":
            parts = [self.literal(name + calls.name_close), *self._tags(schema, is_strict)]
        elif calls.kind == "quoted":
            parts = [self.literal(name), self._quoted_value(schema, schema, 0)]
        elif calls.id_style == "kimi":
            parts = [self.literal(f"functions.{name}:"), "NUMBER", self.literal(calls.name_close)]
            parts.append(self.json(schema, is_strict=is_strict))
        else:
            parts = [self.literal(name + calls.name_close), self.json(schema, is_strict=is_strict)]
        return self.rule("function", " ".join([*parts, self.literal(calls.call_close)]))

    def _with_ids(self, text: str) -> str:
        """Return the expression of a text in which ids stand."""
        return " ID ".join(map(self.literal, text.split(ID_PLACE)))

    def _tags(self, schema: Mapping[str, Any], is_strict: bool) -> list[str]:
        """Return the expressions of arguments between marks, in the order of the schema."""
        calls, parts = self._calls, []
        for key, stated in schema["properties"].items():
            value = resolved(stated, schema)
            opened = self.literal(calls.key_open + key + calls.key_close)
            if value_types(value, schema) == {"string"}:
                texts = _choices(value)
                closed = self.literal(calls.value_close)
                options = " | ".join(map(self.literal, filter(None, texts or ())))
                body = self._text_until(value, calls.value_close)
                body = f"({options}) {closed}" if options else body
            else:
                typed = {**(value or stated)} if isinstance(stated, Mapping) else {}
                typed |= {name: schema[name] for name in _DEFINITIONS if name in schema}
                body = f"{self.json(typed, is_strict=is_strict)} {self.literal(calls.value_close)}"
            parts.append(f"({opened} {body}){'' if key in schema['required'] else '?'}")
        return parts

    def _text_until(self, schema: Mapping[str, Any], mark: str) -> str:
        """Return the expression of a text that a schema limits, up to a mark, with the mark."""
        low, high, pattern = (schema.get(key) for key in ("minLength", "maxLength", "pattern"))
        if low is None and high is None and pattern is None:
            return self.until(mark)
        terms = [f"/(.|\\n){{{low or 0},{'' if high is None else high}}}/"]
        if isinstance(pattern, str):
            start, end = "" if pattern[:1] == "^" else "(?s:.*)", "(?s:.*)"
            end = "" if pattern[-1:] == "$" else end
            pattern = lark_regex(pattern.removeprefix("^").removesuffix("$"))
            terms.append(f"/{start}({pattern}){end}/")
        if mark not in self._special:
            terms.append(f"~/(?s:.*){_SPECIAL_LETTERS.sub(_escaped, mark)}(?s:.*)/")
        name = f"VALUE_{len(self._rules)}"
        self._rules.append(f"{name}: " + " & ".join(terms))
        return f"{name} {self.literal(mark)}"

    def _quoted_value(self, schema: object, root: Mapping[str, Any], depth: int) -> str:
        """Return the expression of a value whose texts stand between quotes."""
        schema = resolved(schema, root)
        quote = self._calls.quote
        texts, types = _choices(schema), value_types(schema, root)
        if depth > _MAX_DEPTH or not types:
            types = frozenset({"string", "number", "boolean", "null"})
        parts = []
        for kind in sorted(types):
            if kind == "string" and texts is not None:
                parts += [self.literal(quote + text + quote) for text in texts]
            elif kind == "string":
                parts.append(f"{self.literal(quote)} {self._text_until(schema, quote)}")
            elif kind == "array":
                items = schema.get("items")
                item = self.rule("item", self._quoted_value(items, root, depth + 1))
                parts.append(f'"[" {_repeated(item, schema)} "]"')
            elif kind == "object":
                parts.append(self._quoted_object(object_schema(schema), root, depth))
            else:
                same = [
                    value
                    for value in _values(schema) or ()
                    if value_types({"const": value}, None) == {kind}
                ]
                typed = {"enum": same} if texts is not None else {**schema, "type": kind}
                typed |= {name: root[name] for name in _DEFINITIONS if name in root}
                parts.append(self.json(typed, is_strict=False))
        return "(" + " | ".join(parts) + ")"

    def _quoted_object(self, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
        """Return the expression of an object with bare keys, in the order of the schema."""
        first = follow = '""'  # what may come after the keys so far, the last key first
        for key, value in reversed(schema["properties"].items()):
            item = f"{self.literal(key + ':')} {self._quoted_value(value, root, depth + 1)}"
            is_needed = key in schema["required"]
            item = self.rule("item", item)
            rest = follow
            follow = self.rule("follow", f'"," {item} {rest}' + f" | {rest}" * (not is_needed))
            first = self.rule("first", f"{item} {rest}" + f" | {first}" * (not is_needed))
        return f'"{{" {first} "}}"'

    def _messages_before(self, heads: Sequence[str]) -> str:
        """Return the expression of messages of channels before the last one."""
        opened, body = self.literal("<|channel|>"), self.literal("<|message|>")
        again = f'{self.literal("<|end|>")} {self.literal("<|start|>")} "assistant"'
        return f"({opened} ({' | '.join(map(_quoted, heads))}) {body} TEXT {again})*"

    def final_message(self, rule: str) -> str:
        """Return the expression of messages of channels of which the last has a form."""
        opened, body = self.literal("<|channel|>"), self.literal("<|message|>")
        return f'{self._messages_before(("analysis",))} {opened} "final" {body} {rule}'

    def harmony(self, functions: Sequence[CallableFunction], *, is_forced: bool) -> str:
        """Return the grammar of messages of channels; the token behind a call ends the answer."""
        opened, body = self.literal("<|channel|>"), self.literal("<|message|>")
        kind = self.literal("<|constrain|>")
        calls = [
            f"{_quoted(f'commentary to=functions.{function.name} ')} {kind} "
            f'"json" {body} ' + self.json(_arguments_of(function), is_strict=function.is_strict)
            for function in functions
        ]
        before = self._messages_before(("analysis",) if is_forced else ("analysis", "commentary"))
        last = " | ".join(calls if is_forced else [*calls, f'"final" {body} TEXT'])
        return self.text_of(f"{before} {opened} ({last})")


_DEFINITIONS = ("$defs", "definitions")


def object_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an object, whose only properties are those that it names."""
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    schema = {**definitions, **resolved(schema, schema)}
    properties, required = schema.get("properties"), schema.get("required")
    found = {
        **schema,
        "type": "object",
        "properties": properties if isinstance(properties, dict) else {},
        "required": required if isinstance(required, list) else [],
    }
    if "additionalProperties" not in schema and not any(name in schema for name in _COMBINED):
        found["additionalProperties"] = False
    return found


_COMBINED = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties")


def _arguments_of(function: CallableFunction) -> dict[str, Any]:
    """Return the schema of the arguments of a function, as far as a grammar can enforce it."""
    schema = object_schema(function.parameters)
    return schema if function.is_strict else enforceable(schema, schema)


_VALUES = ("const", "default", "enum", "examples")
"""Words of schemas whose values are no schemas."""
_NAMED = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
"""Words whose values are schemas by names, which are no words."""
_NEEDS_MEMORY = re.compile(r"\(\?<?[=!]|\\[1-9]|\\k<")
"""Parts of patterns that look around or back, which grammars cannot."""


def enforceable(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Any:
    """Return a schema without what no grammar enforces, as libraries write it all the same.

    Patterns that look around (zod's e-mail addresses), references to other files, empty lists of
    values, and types that are null.

    Args:
        schema: or a list of schemas.
        root: schema with the definitions that it refers to.
        depth: of the schema in another one.
    """
    if depth > _MAX_JSON_DEPTH:
        return schema
    if isinstance(schema, list):
        return [enforceable(item, root, depth + 1) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            inner = {own: enforceable(one, root, depth + 1) for own, one in value.items()}
            found[key] = inner
        else:
            found[key] = value if key in _VALUES else enforceable(value, root, depth + 1)
    pattern, name = found.get("pattern"), found.get("$ref")
    if isinstance(pattern, str) and _NEEDS_MEMORY.search(pattern):
        del found["pattern"]
    if isinstance(name, str) and not resolved(found, root):
        del found["$ref"]
    if found.get("enum") == []:
        del found["enum"]
    if "type" in found and found["type"] is None:
        del found["type"]
    return found


def _values(schema: object) -> list[Any] | None:
    """Return the only values that a schema allows."""
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _choices(schema: object) -> list[str] | None:
    """Return the texts among the only values that a schema allows."""
    values = _values(schema)
    return None if values is None else [value for value in values if isinstance(value, str)]


def _repeated(item: str, schema: Mapping[str, Any]) -> str:
    """Return the expression of the items of a list."""
    low, high = schema.get("minItems") or 0, schema.get("maxItems")
    if high == 0:
        return '""'
    more = f"{{{max(low - 1, 0)},{'' if high is None else high - 1}}}"
    return f'({item} ("," {item}){more})' + "?" * (low == 0)


def _escaped(found: re.Match[str]) -> str:
    return r"\n" if found[0] == "\n" else "\\" + found[0]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
