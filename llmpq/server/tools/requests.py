"""Tools of a request: what is checked, what the template gets, what the answer is made of."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from llmpq.dist.io.sampling_params import StructuredOutputsParams
from llmpq.dist.io.structured_outputs import lark_rule
from llmpq.errors import SpecError
from llmpq.server.errors import ApiError, bad_request
from llmpq.server.protocol import check_json_text
from llmpq.server.text.chat_template import content_text
from llmpq.server.tools.call_format import TemplateFormat
from llmpq.server.tools.call_parser import CallParser
from llmpq.server.tools.custom import CUSTOM, as_function, as_function_call
from llmpq.server.tools.grammar import answer_grammar, form_grammar

Json = dict[str, Any]
Choice = Literal["auto", "none", "required"]
_NAME = re.compile(r"[\w.:/\-]{1,128}")
_NINE = re.compile(r"[A-Za-z0-9]{9}")


class ToolBody(Protocol):
    """The fields of a chat request that concern tools."""

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """The conversation."""
        ...

    @property
    def tools(self) -> Sequence[Mapping[str, Any]] | None:
        """The functions that the model may call."""
        ...

    @property
    def tool_choice(self) -> Any:
        """Whether it must."""
        ...

    @property
    def parallel_tool_calls(self) -> bool | None:
        """Whether an answer may hold several calls."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function that the model may call.

    Attributes:
        name: of the function.
        parameters: JSON schema of its arguments.
        is_strict: whether the arguments must satisfy the schema in any case.
        is_custom: whether it stands for a custom tool.
    """

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False
    is_custom: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTools:
    """What one request needs for tools and reasoning.

    Attributes:
        messages: for the template.
        tools: for the template; ``None`` for none.
        functions: that an answer may call.
        choice: whether it must.
        is_parallel: whether it may hold several calls.
        template: how calls and reasoning are written.
    """

    messages: tuple[Json, ...]
    tools: tuple[Json, ...] | None
    functions: tuple[Function, ...]
    choice: Choice
    is_parallel: bool
    template: TemplateFormat = field(default_factory=TemplateFormat)

    @property
    def is_plain(self) -> bool:
        """Whether an answer is text only, so that it needs no parser."""
        return self.template.calls is None and self.template.reasoning is None

    def is_reasoning(self, prompt: str) -> bool:
        """Return whether a rendered prompt has opened the reasoning of its answer."""
        reasoning = self.template.reasoning
        return reasoning is not None and prompt.rstrip().endswith(reasoning.open)

    def kept_tokens(self, special_tokens: Iterable[str]) -> frozenset[str]:
        """Return the special tokens that must stay in the text of answers, for the parser."""
        marks = self.template.marks
        return frozenset(token for token in special_tokens if any(token in mark for mark in marks))

    def form_grammar(
        self, form: StructuredOutputsParams, prompt: str, special_tokens: Mapping[str, int]
    ) -> str | None:
        """Return the grammar of answers that have a form behind their reasoning.

        ``None`` where the form itself is that of the answer: there is no reasoning, or the form is
        a grammar, which says what an answer begins with.

        Raises:
            ApiError: the form is not valid.
        """
        if self.template.reasoning is None and not _is_harmony(self.template):
            return None
        try:
            rule = lark_rule(form)
        except SpecError as error:
            raise bad_request(str(error), "structured_outputs") from None
        if rule is None:
            return None
        is_reasoning = self.is_reasoning(prompt)
        return form_grammar(self.template, rule, special_tokens, is_reasoning=is_reasoning)

    def parser(self, prompt: str) -> CallParser:
        """Return the parser of one answer to a rendered prompt."""
        return CallParser(
            self.template,
            {function.name: function.parameters for function in self.functions},
            is_reasoning=self.is_reasoning(prompt),
        )

    @property
    def custom_names(self) -> frozenset[str]:
        """Names of functions that stand for custom tools."""
        return frozenset(function.name for function in self.functions if function.is_custom)

    def grammar(self, prompt: str, special_tokens: Mapping[str, int]) -> str | None:
        """Return the grammar of answers to a rendered prompt; ``None`` where any text may come.

        An answer must have a form where a call is required, and from where a call begins where a
        function is strict.

        Args:
            prompt: rendered.
            special_tokens: of the tokenizer, by their texts.
        """
        is_forced = self.choice == "required"
        if not (is_forced or any(function.is_strict for function in self.functions)):
            return None
        return answer_grammar(
            self.template,
            self.functions,
            special_tokens,
            is_forced=is_forced,
            is_parallel=self.is_parallel,
            is_reasoning=self.is_reasoning(prompt),
        )


def prepare(body: ToolBody, template: TemplateFormat) -> PreparedTools:
    """Check the fields of a request that concern tools, and fit its messages to a template.

    Raises:
        ApiError: a field has another form, or the template has no calls and one is required.
    """
    tools, mode = _allowed_tools(body)
    functions = _functions(tools)
    choice, chosen = _choice(mode, functions)
    if choice == "required" and template.calls is None:
        raise bad_request(
            "tool_choice: the chat template of the model has no tool calls: expected 'auto' or "
            "'none'.",
            "tool_choice",
        )
    is_offered = choice != "none" and bool(functions)
    is_parallel = body.parallel_tool_calls is not False and chosen is None
    calls = template.calls if is_offered or _is_harmony(template) else None
    return PreparedTools(
        messages=tuple(template_messages(body.messages, template)),
        tools=tuple(template_tools(tools)) if is_offered else None,
        functions=((chosen,) if chosen else functions) if is_offered else (),
        choice=choice,
        is_parallel=is_parallel and (calls is None or calls.is_parallel),
        template=replace(template, calls=calls),
    )


def _is_harmony(template: TemplateFormat) -> bool:
    return template.calls is not None and template.calls.kind == "harmony"


def _allowed_tools(body: ToolBody) -> tuple[Sequence[Mapping[str, Any]], Any]:
    """Return the tools and the choice among them; those that are not allowed are left out.

    The choice ``allowed_tools`` of chat completions has its fields in an object of that name, the
    one of responses has not.
    """
    tools, choice = body.tools or (), body.tool_choice
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return tools, choice
    stated = choice.get("allowed_tools", choice)
    allowed = stated.get("tools") if isinstance(stated, Mapping) else None
    if not isinstance(allowed, list):
        raise bad_request("tool_choice: expected allowed_tools with tools.", "tool_choice")
    names = [_function_name(tool) for tool in allowed]
    return [tool for tool in tools if _function_name(tool) in names], stated.get("mode")


def _function_name(value: object) -> object:
    """Return the name of the function in a tool or a choice; ``None`` where there is none."""
    if not isinstance(value, Mapping):
        return None
    found = value.get("function", value.get(CUSTOM))
    return (found if isinstance(found, Mapping) else value).get("name")


def _functions(tools: Sequence[Mapping[str, Any]]) -> tuple[Function, ...]:
    found: dict[str, Function] = {}
    for place, tool in enumerate(tools):
        offered = as_function(tool)
        function = offered.get("function")
        if offered.get("type") != "function" or not isinstance(function, Mapping):
            raise _bad_tool(
                place, "expected type 'function' with a function, or 'custom' with a custom"
            )
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise _bad_tool(
                place, f"found the name {name!r:.80}, expected up to 128 letters, digits, '_', '-'"
            )
        if name in found:
            raise _bad_tool(place, f"found the name {name!r} twice")
        parameters = function.get("parameters")
        if not isinstance(parameters, Mapping | None):
            raise _bad_tool(place, "expected parameters to be a JSON schema")
        found[name] = Function(
            name=name,
            parameters=parameters or {},
            is_strict=function.get("strict") is True,
            is_custom=offered is not tool,
        )
    return tuple(found.values())


def _bad_tool(place: int, problem: str) -> ApiError:
    return bad_request(f"tools.{place}: {problem}.", "tools")


def _choice(value: Any, functions: Sequence[Function]) -> tuple[Choice, Function | None]:
    """Return whether a call is required, and the only function that may be called."""
    if value is None:
        return "auto", None
    if value in ("auto", "none"):
        return value, None
    if value == "required":
        if not functions:
            raise bad_request("tool_choice: found 'required' without tools.", "tool_choice")
        return "required", None
    name = _function_name(value)
    if name is None:
        raise bad_request(
            "tool_choice: expected 'auto', 'none', 'required' or "
            '{"type": "function", "function": {"name": ...}}.',
            "tool_choice",
        )
    for function in functions:
        if function.name == name:
            return "required", function
    raise bad_request(
        f"tool_choice: found the function {name!r:.80}, expected one of tools.", "tool_choice"
    )


def template_tools(tools: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Return tools as templates know them: functions."""
    return [dict(as_function(tool)) for tool in tools]


def template_messages(
    messages: Sequence[Mapping[str, Any]], template: TemplateFormat
) -> list[Json]:
    """Return the messages of a conversation as a template needs them.

    Raises:
        ApiError: a part of a message has another form.
    """
    names: dict[str, str] = {}
    return [_message(place, message, template, names) for place, message in enumerate(messages)]


def _message(
    place: int, message: Mapping[str, Any], template: TemplateFormat, names: dict[str, str]
) -> Json:
    is_result = message.get("role") in ("tool", "function")
    content = content_text(message.get("content"), is_result=is_result)
    plain: Json = {**message, "content": content}
    calls = message.get("tool_calls")
    old = plain.pop("function_call", None)
    if calls is None and isinstance(old, Mapping):
        calls = [{"id": f"call_{place}", "type": "function", "function": old}]
    if isinstance(calls, list):
        plain["tool_calls"] = [_call(place, call, template, names) for call in calls]
    elif calls is not None:
        raise bad_request(f"messages.{place}: expected tool_calls to be a list.", "messages")
    if not plain.get("tool_calls"):
        plain.pop("tool_calls", None)
    if message.get("role") == "function":
        plain["role"] = "tool"
    if plain.get("role") == "tool":
        _fit_result(place, plain, template, names)
    return plain


def _call(place: int, call: object, template: TemplateFormat, names: dict[str, str]) -> Json:
    call = as_function_call(call) if isinstance(call, Mapping) else call
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise bad_request(f"messages.{place}: expected tool_calls with a function.", "messages")
    name, id = function.get("name"), call.get("id")
    if not isinstance(name, str) or not name:
        raise bad_request(f"messages.{place}: found a tool call without a name.", "messages")
    if not isinstance(id, str | None):
        raise bad_request(f"messages.{place}: expected the id of a tool call as text.", "messages")
    fitted = _fitted_id(id or f"call_{place}_{len(names)}", template)
    names[fitted] = name
    arguments = fitted_arguments(function.get("arguments"), template)
    return {
        **call,
        "id": fitted,
        "type": "function",
        "function": {**function, "arguments": arguments},
    }


def _fit_result(place: int, message: Json, template: TemplateFormat, names: dict[str, str]) -> None:
    """Give the result of a call its id and the name of its function."""
    id = message.get("tool_call_id")
    if not isinstance(id, str | None):
        raise bad_request(f"messages.{place}: expected tool_call_id as text.", "messages")
    if id is not None:
        message["tool_call_id"] = _fitted_id(id, template)
    elif names:
        message["tool_call_id"] = next(
            (key for key, name in reversed(names.items()) if name == message.get("name")),
            next(reversed(names)),
        )
    name = names.get(str(message.get("tool_call_id")))
    if not message.get("name") and name is not None:
        message["name"] = name


def _fitted_id(id: str, template: TemplateFormat) -> str:
    """Return an id as the template takes it."""
    if template.calls is None or template.calls.id_style != "nine" or _NINE.fullmatch(id):
        return id
    return hashlib.blake2b(id.encode(), digest_size=5).hexdigest()[:9]


def fitted_arguments(arguments: object, template: TemplateFormat) -> object:
    """Return the arguments of a call in the history as a template needs them.

    Arguments that are no JSON object are passed as text: the model has made them itself, and must
    see them to understand the error that follows.
    """
    value: object = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments or "{}")
            check_json_text(value)
        except (ValueError, RecursionError):
            value = arguments
    value = {} if value is None else value
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False) if template.needs_text_arguments else value
    text = arguments if isinstance(arguments, str) else json.dumps(value, ensure_ascii=False)
    return text if template.takes_text_arguments else {"arguments": text}
