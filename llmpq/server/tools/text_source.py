"""A text that arrives in parts, and steps that read it.

A step is a generator: it yields when it needs more text, and returns what it has read. What a step
does depends on the text alone, never on where it was cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
Emit = Callable[[str], None]
_BLANKS = re.compile(r"\s*")
_SCALAR = re.compile(r"[^\s,}\]<]*")
_INSIDE_STRING = re.compile(r'[^"\\]*')
_OUTSIDE_STRING = re.compile(r'[^"{}\[\]<]*')


class TextSource:
    """Reads a text that arrives in parts.

    Attributes:
        is_finished: whether no more text follows.
    """

    def __init__(self) -> None:
        self.is_finished = False
        self._buffer = ""
        self._place = 0
        self._mark: int | None = None
        self._num_cut = 0

    @property
    def position(self) -> int:
        """Characters of the whole text before the next one, or before the place marked."""
        return self._num_cut + (self._place if self._mark is None else self._mark)

    def feed(self, text: str) -> None:
        """Add text."""
        self._buffer += text

    def mark(self) -> None:
        """Remember this place."""
        self._mark = self._place

    def release(self) -> None:
        """Forget the place that was marked."""
        self._mark = None

    def rewind(self) -> None:
        """Go back to the place that was marked."""
        assert self._mark is not None
        self._place, self._mark = self._mark, None

    def peek(self) -> Steps[str]:
        """Return the next character; empty at the end of the text."""
        yield from self._wait_for(1)
        return self._buffer[self._place : self._place + 1]

    def skip(self, count: int) -> str:
        """Return the next characters, which have arrived."""
        found = self._buffer[self._place : self._place + count]
        self._place += len(found)
        return found

    def literal(self, text: str) -> Steps[bool]:
        """Read a text if it comes next."""
        for length in range(1, len(text) + 1):
            yield from self._wait_for(length)
            if not self._buffer.startswith(text[:length], self._place):
                return False
        self._place += len(text)
        return True

    def tokens(self, texts: Sequence[str]) -> Steps[bool]:
        """Read texts with white space before them, if all of them come next."""
        start = self._place
        for text in texts:
            yield from self.run(_BLANKS, _drop, is_kept=True)
            if not (yield from self.literal(text)):
                self._place = start
                return False
        return True

    def any_of(self, texts: Sequence[str]) -> Steps[bool]:
        """Read the first of some texts that comes next, if one does."""
        for text in texts:
            if (yield from self.literal(text)):
                return True
        return False

    def comes(self, text: str) -> Steps[bool]:
        """Return whether a text comes next, after white space; read nothing."""
        start = self._place
        found = yield from self.tokens((text,))
        self._place = start
        return found

    def blanks(self) -> Steps[None]:
        """Read white space."""
        yield from self.run(_BLANKS, _drop, is_kept=True)

    def run(self, pattern: re.Pattern[str], emit: Emit, *, is_kept: bool = False) -> Steps[None]:
        """Read the characters of a class.

        Args:
            pattern: any number of characters of the class.
            emit: takes what was read.
            is_kept: whether a caller may go back to a place before.
        """
        while True:
            found = pattern.match(self._buffer, self._place)
            assert found is not None
            emit(found.group())
            self._place = found.end()
            if self._place < len(self._buffer) or self.is_finished:
                return
            if not is_kept:
                self._cut()
            yield

    def until(self, marks: Sequence[str], emit: Emit, *, is_read: bool = True) -> Steps[str]:
        """Read up to one of some marks, and return that; empty at the end of the text.

        Args:
            marks: none of them begins with another.
            emit: takes the text before the mark.
            is_read: whether the mark is read too.
        """
        pattern = _any_of(tuple(marks))
        while True:
            found = pattern.search(self._buffer, self._place)
            end = self._unclear_from(marks)
            if found is not None and (found.start() <= end or self.is_finished):
                emit(self._buffer[self._place : found.start()])
                self._place = found.end() if is_read else found.start()
                return found.group()
            end = len(self._buffer) if self.is_finished else end
            emit(self._buffer[self._place : end])
            self._place = end
            if self.is_finished:
                return ""
            self._cut()
            yield

    def json_value(self, emit: Emit) -> Steps[bool]:
        """Read a JSON value; ``False`` if the text ends or is no JSON before the value's end."""
        first = yield from self.peek()
        if first not in ("{", "[", '"'):
            parts: list[str] = []
            yield from self.run(_SCALAR, parts.append)
            text = "".join(parts)
            emit(text)
            return is_json(text)
        depth = 0
        while True:
            yield from self.run(_OUTSIDE_STRING, emit)
            letter = yield from self.peek()
            if letter in ("", "<"):  # a mark of the format: the value is not whole
                return False
            emit(self.skip(1))
            if letter == '"':
                if not (yield from self._string_end(emit)):
                    return False
            else:
                depth += 1 if letter in "{[" else -1
            if depth == 0:
                return True

    def collect(self, step: Callable[[Emit], Steps[T]]) -> Steps[tuple[str, T]]:
        """Return what a step emits, and what it returns."""
        parts: list[str] = []
        found = yield from step(parts.append)
        return "".join(parts), found

    def _string_end(self, emit: Emit) -> Steps[bool]:
        while True:
            yield from self.run(_INSIDE_STRING, emit)
            letter = yield from self.peek()
            if not letter:
                return False
            if letter == "\\":
                yield from self._wait_for(2)
            emit(self.skip(2 if letter == "\\" else 1))
            if letter == '"':
                return True

    def _wait_for(self, count: int) -> Steps[None]:
        while len(self._buffer) - self._place < count and not self.is_finished:
            yield

    def _unclear_from(self, marks: Sequence[str]) -> int:
        """Return where a mark may have begun of which more has to arrive."""
        size = len(self._buffer)
        for place in range(max(self._place, size - max(map(len, marks), default=1) + 1), size):
            tail = self._buffer[place:]
            if any(len(tail) < len(mark) and mark.startswith(tail) for mark in marks):
                return place
        return size

    def _cut(self) -> None:
        """Forget what was read."""
        start = self._place if self._mark is None else self._mark
        self._buffer = self._buffer[start:]
        self._num_cut += start
        self._place -= start
        self._mark = None if self._mark is None else 0


def is_json(text: str) -> bool:
    """Return whether a text is JSON."""
    try:
        json.loads(text, parse_constant=_reject)
    except (ValueError, RecursionError):
        return False
    return True


def _reject(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _drop(_text: str) -> None:
    """Take text that has no meaning."""


@lru_cache(maxsize=64)
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)) or "(?!)")
