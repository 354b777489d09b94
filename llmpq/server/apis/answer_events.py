"""Splits the answers to a request into text, reasoning and tool calls, for every chat API."""

from __future__ import annotations

from collections.abc import Sequence

from llmpq.server.service import ChoiceDelta, PreparedRequest
from llmpq.server.tools import CallEnd, Event, TextDelta


class AnswerSplitter:
    """Splits the deltas of the answers to one request.

    Args:
        request: what is answered.
    """

    def __init__(self, request: PreparedRequest) -> None:
        tools, text = request.tools, request.prompt_text
        self._parsers = (
            [] if tools is None else [tools.parser(text) for _ in range(request.num_choices)]
        )

    def events(self, delta: ChoiceDelta) -> Sequence[Event]:
        """Return the events of a delta; a call that the limit of the answer cuts does not end."""
        if not self._parsers:
            return [TextDelta(delta.text)]
        parser = self._parsers[delta.index]
        events = parser.feed(delta.text)
        if delta.finish_reason is None:
            return events
        is_cut, last = delta.finish_reason == "length", parser.finish()
        kept = [event for event in last if not (is_cut and isinstance(event, CallEnd))]
        return [*events, *kept]

    def ends_in_calls(self, delta: ChoiceDelta) -> bool:
        """Return whether an answer ends for its calls; ``events`` was given the last delta."""
        has_calls = bool(self._parsers) and self._parsers[delta.index].num_calls > 0
        return has_calls and delta.finish_reason == "stop"
