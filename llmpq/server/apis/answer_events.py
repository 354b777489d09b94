"""Splits the answers to a request into text, reasoning and tool calls, for every chat API."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from llmpq.server.service import ChoiceDelta, PreparedRequest
from llmpq.server.tools import CallEnd, CallParser, CustomInputs, Event, TextDelta


class _ReasoningCounter:
    """Counts the tokens of one answer whose text begins between the marks of reasoning."""

    def __init__(self) -> None:
        self.count = 0
        self._offsets: deque[int] = deque()  # of tokens that the parser has not read

    def add(self, offsets: Sequence[int], parser: CallParser) -> None:
        """Take the offsets of new tokens, whose text the parser got."""
        self._offsets.extend(offsets)
        while self._offsets and self._offsets[0] < parser.position:
            self.count += parser.is_reasoning_at(self._offsets.popleft())


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
        self._counters = [_ReasoningCounter() for _ in self._parsers]
        custom = frozenset[str]() if tools is None else tools.custom_names
        self._inputs = [CustomInputs(custom) for _ in self._parsers]

    def events(self, delta: ChoiceDelta) -> Sequence[Event]:
        """Return the events of a delta; a call that the limit of the answer cuts does not end."""
        if not self._parsers:
            return [TextDelta(delta.text)]
        parser = self._parsers[delta.index]
        events = parser.feed(delta.text)
        last = [] if delta.finish_reason is None else parser.finish()
        self._counters[delta.index].add(delta.offsets, parser)
        is_cut = delta.finish_reason == "length"
        kept = [event for event in last if not (is_cut and isinstance(event, CallEnd))]
        return self._inputs[delta.index].events([*events, *kept])

    def reasoning_tokens(self, index: int | None = None) -> int:
        """Return the number of reasoning tokens so far, of one answer or of all."""
        counters = self._counters if index is None else self._counters[index : index + 1]
        return sum(counter.count for counter in counters)

    def ends_in_calls(self, delta: ChoiceDelta) -> bool:
        """Return whether an answer ends for its calls; ``events`` was given the last delta."""
        has_calls = bool(self._parsers) and self._parsers[delta.index].num_calls > 0
        return has_calls and delta.finish_reason == "stop"
