"""Prompt lookup: draft tokens are those that followed the last tokens where they were before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmpq.batching.speculation import SpeculativeConfig


class PromptLookup:
    """Finds drafts in the tokens of one sequence.

    Args:
        config: lengths of what is looked up.
    """

    __slots__ = ("_config", "_length", "_tokens")

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._tokens: NDArray[np.int64] = np.empty(256, np.int64)
        self._length = 0

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return up to ``most`` tokens that may follow; none where nothing repeats itself.

        Args:
            tokens: prompt and answer so far; they begin with those of the call before.
            most: at least 1.
        """
        known = self._extend(tokens)
        start = self._continuation(known)
        if start is None:
            return []
        # What repeats itself up to its own end goes on with its own beginning.
        period = len(known) - start
        return [int(known[start + at % period]) for at in range(most)]

    def _extend(self, tokens: Sequence[int]) -> NDArray[np.int64]:
        """Return all tokens as an array."""
        if len(tokens) > len(self._tokens):
            larger = np.empty(2 * len(tokens), np.int64)
            larger[: self._length] = self._tokens[: self._length]
            self._tokens = larger
        self._tokens[self._length : len(tokens)] = tokens[self._length :]
        self._length = len(tokens)
        return self._tokens[: self._length]

    def _continuation(self, known: NDArray[np.int64]) -> int | None:
        """Return where the latest of the longest matches goes on, ``None`` without one."""
        ends = np.flatnonzero(known[:-1] == known[-1]) + 1  # of the matches
        length, found = 1, None
        while len(ends):
            if length >= self._config.prompt_lookup_min:
                found = int(ends[-1])
            if length == self._config.prompt_lookup_max:
                break
            length += 1
            ends = ends[ends >= length]
            ends = ends[known[ends - length] == known[-length]]
        return found
