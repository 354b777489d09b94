"""Where draft tokens come from: prompt lookup in a sequence's own tokens, or a draft model.

A draft model is a small model with KV blocks of its own, which computes the draft tokens of a step.
Which sequences have drafts, how long, and in which blocks, is the scheduler's decision
(``llmpq.batching.engine_step``). ``DraftModel`` runs in the process of rank 0, or in one of its own
on another device: there a ``DraftWorker`` serves the master's ``RemoteDraftModel``.

Both send rows of token ids: the master the tokens that are not known yet, with a 0 for each draft
token that is an input, the worker the draft tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from llmpq.batching.engine_step import FEW_TOKENS, DraftWork
from llmpq.batching.speculation import SpeculativeConfig
from llmpq.dist.engine.executor import StepExecutor
from llmpq.dist.metrics.measurement import HeldBytes, StageStats
from llmpq.dist.metrics.stats import StageClock
from llmpq.dist.transport.communicator import (
    Communicator,
    error_from_frame,
    shut_down,
    wait_until_ready,
)
from llmpq.dist.transport.frames import Frame, FrameKind, Row
from llmpq.errors import LlmpqError, StageError
from llmpq.logging import get_logger
from llmpq.spec.fields import to_json
from llmpq.spec.precision import Phase
from llmpq.spec.runtime_constants import KV_BLOCK_SIZE

_log = get_logger(__name__)


class Drafter(Protocol):
    """Proposes draft tokens."""

    def propose(
        self, works: Sequence[DraftWork], tokens: Sequence[Sequence[int]]
    ) -> list[list[int]] | None:
        """Return the draft tokens of each sequence; see :meth:`DraftModel.propose`.

        ``None``: there are none any more, as its process has ended.
        """
        ...

    def finish(self) -> StageStats | None:
        """End its process; return its measurements, ``None`` without one of its own."""
        ...


class DraftModel:
    """Proposes the tokens that a small model finds most likely.

    Args:
        executor: of the small model; no other steps are in flight there.
        block_size: tokens of a KV block.
        token_budget: most tokens of a prompt in one pass.
        held: bytes of its tensors, ``None`` if not counted.
    """

    def __init__(
        self,
        executor: StepExecutor,
        *,
        block_size: int,
        token_budget: int,
        held: HeldBytes | None = None,
    ) -> None:
        self.held = held
        self._executor = executor
        self._block_size = block_size
        self._token_budget = token_budget

    def propose(
        self, works: Sequence[DraftWork], tokens: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """Return the draft tokens of each sequence.

        Args:
            works: at least one.
            tokens: prompt and answer of each of them, at least ``work.tokens``.

        Raises:
            StageError: the small model failed.
        """
        drafts: list[list[int]] = [[] for _ in works]
        newest = [
            list(ids[self._catch_up(work, ids) : work.tokens])
            for work, ids in zip(works, tokens, strict=True)
        ]
        for done in range(max(work.length for work in works)):
            active = [place for place, work in enumerate(works) if work.length > done]
            rows: list[Row] = []
            outputs: list[int] = []
            for place in active:
                # Every token is a row of its own, as a compiled decode step wants it.
                end, count = works[place].tokens + done, len(newest[place])
                rows += [self._row(works[place], at, at + 1) for at in range(end - count, end)]
                outputs.append(len(rows) - 1)
            ids = [token for place in active for token in newest[place]]
            for place, token in zip(active, self._best(ids, rows, outputs), strict=True):
                drafts[place].append(token)
                newest[place] = [token]
        return drafts

    def finish(self) -> None:
        """Do nothing: it ends with rank 0, which measures it."""

    def _catch_up(self, work: DraftWork, ids: Sequence[int]) -> int:
        """Compute a prompt but for its last token; return the first token that is not computed."""
        first = work.first
        if work.tokens - first <= FEW_TOKENS:
            return first
        while first < work.tokens - 1:
            end = min(first + self._token_budget, work.tokens - 1)
            row = self._row(work, first, end)
            self._executor.dispatch(0, None, np.array(ids[first:end]), [row], [])
            self._executor.collect()
            first = end
        return first

    def _row(self, work: DraftWork, first: int, end: int) -> Row:
        blocks = work.blocks[: -(-end // self._block_size)]
        return Row(blocks=blocks, first=first, length=end)

    def _best(self, ids: Sequence[int], rows: Sequence[Row], outputs: Sequence[int]) -> list[int]:
        """Return the most likely token after each of some rows."""
        self._executor.dispatch(0, None, np.array(ids), rows, outputs)
        scores = self._executor.collect().scores
        assert scores is not None
        best: list[int] = scores.argmax(dim=-1).tolist()
        return best


class RemoteDraftModel:
    """The draft model of another process, as the master uses it.

    Args:
        communicator: the ring with that process.

    Raises:
        LlmpqError: it could not be loaded.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._next_number = 0
        self._is_lost = False
        wait_until_ready(communicator)

    def propose(
        self, works: Sequence[DraftWork], tokens: Sequence[Sequence[int]]
    ) -> list[list[int]] | None:
        """Return the draft tokens of each sequence, ``None`` once the other process has ended."""
        if self._is_lost:
            return None
        try:
            return self._ask(works, tokens)
        except LlmpqError as error:
            self._lose(error)
            return None

    def finish(self) -> StageStats | None:
        """End the other process; return its measurements, ``None`` if it had ended before."""
        if self._is_lost:
            return None
        try:
            (found,) = shut_down(self._communicator)
        except LlmpqError as error:
            self._lose(error)
            return None
        return found

    def _ask(self, works: Sequence[DraftWork], tokens: Sequence[Sequence[int]]) -> list[list[int]]:
        number, self._next_number = self._next_number, self._next_number + 1
        rows, known = [], []
        for work, ids in zip(works, tokens, strict=True):
            end = work.tokens + work.length - 1
            blocks = work.blocks[: -(-end // KV_BLOCK_SIZE)]
            rows.append(Row(blocks=blocks, first=work.first, length=end, origin=work.length))
            known += [*ids[work.first : work.tokens], *[0] * (work.length - 1)]
        self._communicator.send(_token_frame(number, rows, known))
        frame = self._communicator.recv()
        if frame.kind is FrameKind.ERROR:
            raise error_from_frame(frame)
        lengths = [work.length for work in works]
        found = [row.length - row.first for row in frame.rows]
        if (frame.kind, frame.micro_batch, found) != (FrameKind.MIXED, number, lengths):
            name = self._communicator.names[self._communicator.ranks[-1]]
            raise StageError(
                f"{name}: found step {frame.micro_batch} ({frame.kind.name}) with drafts of "
                f"{found} tokens, expected {number} (MIXED) and {lengths}"
            )
        return _split(frame)

    def _lose(self, error: LlmpqError) -> None:
        self._is_lost = True
        self._communicator.close()
        _log.warning("%s; going on without drafts", error)


class DraftWorker:
    """The loop of the rank of a draft model.

    Args:
        model: the draft model.
        communicator: the ring with the master.
        clock: collects busy times.
        device: where the model runs.
    """

    def __init__(
        self,
        *,
        model: DraftModel,
        communicator: Communicator,
        clock: StageClock,
        device: torch.device,
    ) -> None:
        self._model = model
        self._communicator = communicator
        self._clock = clock
        self._device = device

    def run(self) -> None:
        """Say that the model is ready, then serve until the master ends the run.

        Raises:
            StageError: the master is gone.
        """
        self._communicator.send(Frame(kind=FrameKind.READY))
        while True:
            frame = self._communicator.recv()
            if frame.kind is FrameKind.MIXED:
                self._communicator.send(self._compute(frame))
            elif frame.kind is FrameKind.SHUTDOWN:
                stats = self._clock.stats(self._communicator.rank, self._device)
                text = json.dumps(to_json(stats)).encode()
                self._communicator.send(Frame(kind=FrameKind.STATS, text=text))
                self._communicator.send(frame)
                return
            else:
                raise StageError(f"found a frame {frame.kind.name}, expected draft tokens to make")

    def _compute(self, frame: Frame) -> Frame:
        start_s = self._clock.now()
        works, tokens = [], []
        for number, (row, ids) in enumerate(zip(frame.rows, _split(frame), strict=True)):
            first, end, length = row.first, row.length, row.origin
            if not 1 <= length <= end - first:
                raise StageError(
                    f"found {length} draft tokens at [{first}, {end}), expected 1 to {end - first}"
                )
            count = end - length + 1
            works.append(DraftWork(number, first, count, length, row.blocks))
            # The tokens before are in the blocks.
            tokens.append([*[0] * first, *ids[: count - first]])
        drafts = self._model.propose(works, tokens)
        rows = [replace(row, first=row.length - row.origin) for row in frame.rows]
        self._clock.record(Phase.DECODE, len(rows), self._clock.now() - start_s)
        return _token_frame(frame.micro_batch, rows, [token for ids in drafts for token in ids])


def _token_frame(number: int, rows: Sequence[Row], ids: Sequence[int]) -> Frame:
    hidden = torch.tensor(ids, dtype=torch.int32)[None, :, None]  # [1, N, 1]
    return Frame(kind=FrameKind.MIXED, micro_batch=number, rows=tuple(rows), hidden=hidden)


def _split(frame: Frame) -> list[list[int]]:
    """Return the token ids of each row of a frame."""
    assert frame.hidden is not None  # checked with the header
    ids: list[int] = frame.hidden.flatten().tolist()
    found, at = [], 0
    for row in frame.rows:
        found.append(ids[at : at + row.length - row.first])
        at += row.length - row.first
    return found


class PromptLookup:
    """Finds drafts in the tokens of one sequence: what followed its last tokens earlier in it.

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
