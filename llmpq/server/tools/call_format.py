"""How a model writes tool calls and reasoning: values that a chat template determines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["object", "json", "tags", "quoted", "harmony"]
IdStyle = Literal["random", "nine", "kimi"]
ID_PLACE = "\0"
"""Stands for the id of a call in the text around its name."""
_BORDER = re.compile(r"\s+|(?<=[>\]])(?=\S)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    r"""The text around the parts of a tool call, as the chat template writes it.

    A group of calls is ``group_open``, calls with ``separator`` between them, and ``group_close``.
    Each call is ``call_open``, the name and the arguments, and ``call_close``. Between name and
    arguments stands, by ``kind``:

    ``object``
        ``name_open`` name ``name_close`` JSON ``object_close``, together one JSON object.
    ``json``
        name ``name_close`` JSON.
    ``tags``
        name ``name_close``, and for each argument ``key_open`` key ``key_close`` value
        ``value_close``; a value that the schema wants as a text is not JSON.
    ``quoted``
        name, and an object whose keys are bare and whose texts stand between two ``quote``.
    ``harmony``
        messages of channels.

    Attributes:
        kind: where the name and the arguments stand.
        group_open: before the first call of a group.
        group_close: after the last call of a group.
        call_open: before each call.
        call_close: after each call.
        separator: between two calls.
        name_open: before the name, in an object.
        name_close: after the name.
        object_close: after the arguments, in an object.
        name_key: of the object.
        arguments_key: of the object.
        key_open: before the name of an argument.
        key_close: between the name and the value of an argument.
        value_close: after the value of an argument.
        quote: around texts.
        optional_open: may stand before a group that has no mark of its own.
        id_style: of the ids that the template takes.
        is_parallel: whether an answer may hold several calls.
    """

    kind: Kind
    group_open: str = ""
    group_close: str = ""
    call_open: str = ""
    call_close: str = ""
    separator: str = ""
    name_open: str = ""
    name_close: str = ""
    object_close: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    key_open: str = ""
    key_close: str = ""
    value_close: str = ""
    quote: str = ""
    optional_open: str = ""
    id_style: IdStyle = "random"
    is_parallel: bool = True

    @property
    def is_bare(self) -> bool:
        """Whether nothing marks where a call begins but its JSON."""
        return self.kind == "object" and not pieces(self.group_open + self.call_open)

    @property
    def trigger(self) -> str:
        """The first mark of a group of calls; empty where there is none."""
        found = pieces(self.group_open + self.call_open)
        return found[0] if found else self.optional_open

    @property
    def second_trigger(self) -> str:
        """The mark behind the first, with which models begin calls as well; empty for none."""
        found = pieces(self.group_open + self.call_open)
        return found[1] if self.kind == "tags" and len(found) == 2 else ""

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts that may hold special tokens."""
        return (
            *(self.group_open, self.group_close, self.call_open, self.call_close, self.separator),
            *(self.name_open, self.name_close, self.object_close, self.key_open, self.key_close),
            *(self.value_close, self.quote, self.optional_open),
        )


HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", *HARMONY_ENDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """The marks around the reasoning of an answer.

    Attributes:
        open: before it.
        close: after it.
    """

    open: str
    close: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFormat:
    """What a chat template says about answers, and what it needs in messages.

    Attributes:
        calls: how calls are written; ``None`` if the template has none.
        reasoning: how reasoning is marked; ``None`` if the template has none, or for harmony.
        needs_text_arguments: whether the arguments of calls in the history are JSON texts, instead
            of objects.
        takes_text_arguments: whether arguments that are no object may be a text.
    """

    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None
    needs_text_arguments: bool = False
    takes_text_arguments: bool = True

    @property
    def marks(self) -> frozenset[str]:
        """Texts of the format; special tokens among or in them must stay in the text of answers."""
        found: set[str] = set()
        if self.calls is not None:
            found.update(self.calls.texts)
            if self.calls.kind == "harmony":
                found.update(HARMONY_MARKS)
        if self.reasoning is not None:
            found.update((self.reasoning.open, self.reasoning.close))
        return frozenset(found - {""})


def pieces(text: str) -> tuple[str, ...]:
    r"""Return the marks of a text, between which any white space may stand.

    >>> pieces("<tool_call>\n<function=")
    ('<tool_call>', '<function=')
    """
    return tuple(filter(None, _BORDER.split(text)))
