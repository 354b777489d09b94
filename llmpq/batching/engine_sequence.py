"""EngineSequence: what the scheduler of an engine knows of an unfinished request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from llmpq.batching.blocks import BlockKey
from llmpq.batching.engine_step import EngineRequest, ScheduledChunk
from llmpq.batching.speculation import DraftCredit


@dataclass(slots=True, kw_only=True, eq=False)
class EngineSequence:
    """State of an unfinished request: its tokens, its blocks, the step that it is in.

    ``tokens`` counts prompt and answer so far; ``computed`` those with keys and values in
    ``blocks``, the step in flight with its draft tokens included. ``window_blocks`` are those of
    layers with windows, of which it holds those from ``window_first`` on.
    """

    request: EngineRequest
    tokens: int
    ids: list[int] | None
    credit: DraftCredit
    turn: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    table: tuple[int, ...] = ()
    window_blocks: list[int] = field(default_factory=list)
    window_first: int = 0
    window_table: tuple[int, ...] = ()
    keys: list[BlockKey] = field(default_factory=list)
    in_step: int | None = None
    last_step: int = -1
    is_aborted: bool = False
    was_admitted: bool = False

    @property
    def most_draft_tokens(self) -> int:
        """Tokens of the longest answer that a draft can have; its last one is never an input."""
        return self.request.prompt_tokens + self.request.max_tokens - 1 - self.tokens


class StepInFlight(NamedTuple):
    """A step that is not complete: when it began, and its chunks."""

    start_s: float
    chunks: tuple[ScheduledChunk, ...]
