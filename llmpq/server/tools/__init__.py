"""Tool calls and reasoning of chat models, in the form that each chat template gives them.

A request path uses the package so::

    template = read_template(render, chat_template)  # once for each model
    prepared = prepare(body, template)  # raises ApiError for a bad request
    prompt = await tokenizer.render(prepared.messages, tools=prepared.tools, ...)
    grammar = prepared.grammar(prompt, special_tokens)  # of structured outputs, or None
    parser = prepared.parser(prompt)  # one for each answer, unless prepared.is_plain
    for text in answer:  # decoded with the special tokens of prepared.kept_tokens(...)
        events = parser.feed(text)
        delta = chat_delta(events)  # of a stream of chat completions
        steps = parts.add(events)  # of other streams, and of whole answers: AnswerParts
    events = parser.finish()

An answer with calls (``parser.num_calls``) that has stopped by itself has the ``finish_reason``
``"tool_calls"``.

The functions are pure, and need no torch: rendering is the caller's, and what an answer consists of
follows from its text alone, whatever its parts.
"""

from llmpq.server.tools.call_format import CallFormat, ReasoningFormat, TemplateFormat
from llmpq.server.tools.call_parser import CallParser
from llmpq.server.tools.custom import CustomInputs
from llmpq.server.tools.events import (
    AnswerPart,
    AnswerParts,
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    Event,
    PartStep,
    ReasoningDelta,
    TextDelta,
    chat_delta,
    join_events,
)
from llmpq.server.tools.read_template import read_template
from llmpq.server.tools.requests import PreparedTools, prepare, template_messages, template_tools

__all__ = [
    "AnswerPart",
    "AnswerParts",
    "ArgumentsDelta",
    "CallBegin",
    "CallEnd",
    "CallFormat",
    "CallParser",
    "CustomInputs",
    "Event",
    "PartStep",
    "PreparedTools",
    "ReasoningDelta",
    "ReasoningFormat",
    "TemplateFormat",
    "TextDelta",
    "chat_delta",
    "join_events",
    "prepare",
    "read_template",
    "template_messages",
    "template_tools",
]
