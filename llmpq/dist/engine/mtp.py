"""Draft tokens of a model's own layer for multi-token prediction.

The layer has an entry for every token: made of the token's final hidden state, which a step of the
model computed, and of the next token. Its keys and values lie in blocks of the numbers that the
sequence has in the model's layers, so that they come back with the beginning of a prompt that is
found again. A prompt's entries are computed with each of its chunks. Those of an answer wait until
the next draft, or until they are a step of their own.

Shapes: N tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from llmpq.batching.engine_step import DraftWork
from llmpq.batching.speculation import MAX_STEP_TOKENS
from llmpq.dist.engine.executor import StageRunner
from llmpq.dist.metrics.measurement import HeldBytes
from llmpq.dist.transport.frames import Row
from llmpq.models import Master, MtpEnds


@dataclass(slots=True, eq=False)
class _Sequence:
    """What is known of a sequence.

    Attributes:
        first: the entries before are computed, or can be no more.
        states: hidden states ``[N, H]`` of the tokens from ``first`` on.
        blocks: of the sequence.
        last: state ``[H]`` of the entry before ``first``; ``None`` before the first one.
    """

    first: int = 0
    states: list[Tensor] = field(default_factory=list)
    blocks: tuple[int, ...] = ()
    last: Tensor | None = None

    @property
    def waiting(self) -> int:
        """Entries that are not computed."""
        return sum(len(one) for one in self.states)


class _Entries(NamedTuple):
    """Entries of one sequence in a call of the layer: from ``first`` on, of ``tokens`` behind."""

    blocks: Sequence[int]
    first: int
    tokens: Sequence[int]
    states: Tensor


class MtpDrafter:
    """Proposes the tokens that the layer finds most likely.

    Args:
        master: embedding and head of the model.
        ends: what is before and after the layer.
        runner: the layer, with blocks as many as the model's.
        block_size: tokens of a KV block.
        held: bytes of its tensors, ``None`` if not counted.
    """

    def __init__(
        self,
        *,
        master: Master,
        ends: MtpEnds,
        runner: StageRunner,
        block_size: int,
        held: HeldBytes | None = None,
    ) -> None:
        self.held = held
        self._master = master
        self._ends = ends
        self._runner = runner
        self._block_size = block_size
        self._sequences: dict[int, _Sequence] = {}

    def observe(
        self,
        request: int,
        first: int,
        states: Tensor,
        tokens: Sequence[int],
        blocks: tuple[int, ...],
    ) -> None:
        """Take what a step of the model computed of a sequence.

        Args:
            request: number of the request.
            first: position of the first token of the step.
            states: final hidden states of its tokens ``[N, H]``; of draft tokens that were not
                accepted, there may be more.
            tokens: prompt and answer, those that the step made included.
            blocks: of the sequence, for these tokens.
        """
        own = self._sequences.setdefault(request, _Sequence())
        known = own.first + own.waiting
        if first > known or first < own.first:
            # Found in the cache of prefixes, or computed anew.
            own.first, own.states, own.last = first, [], None
        elif first < known:
            own.states = [torch.cat(own.states)[: first - own.first]]
        # A copy: a step's memory is used again.
        own.states.append(states[: max(0, len(tokens) - 1 - first)].clone())
        own.blocks = blocks
        if own.waiting >= MAX_STEP_TOKENS:
            self._catch_up([own], [tokens])

    def forget(self, request: int, tokens: Sequence[int] | None = None) -> None:
        """End a sequence; with its ``tokens``, what may be found again is completed."""
        own = self._sequences.pop(request, None)
        if own is not None and tokens is not None and own.waiting:
            self._catch_up([own], [tokens])

    def propose(
        self, works: Sequence[DraftWork], tokens: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """Return the draft tokens of each sequence.

        The entry of the token before the newest is missing where all but the last token of a
        prompt were found in the cache of prefixes, or there is no other: any tokens do then.

        Args:
            works: at least one, with the blocks of the sequence for all of its draft tokens.
            tokens: prompt and answer of each of them.
        """
        drafts = [[ids[-1]] * work.length for work, ids in zip(works, tokens, strict=True)]
        known: dict[int, _Sequence] = {}  # by place
        for place, work in enumerate(works):
            own = self._sequences.get(work.request)
            if own is not None and own.first + own.waiting == work.tokens - 1:
                own.blocks = work.blocks
                known[place] = own
        waiting = [place for place, own in known.items() if own.waiting]
        self._catch_up([known[place] for place in waiting], [tokens[place] for place in waiting])
        states = {place: own.last for place, own in known.items() if own.last is not None}
        for done in range(max(work.length for work in works)):
            active = [place for place in states if works[place].length > done]
            if not active:
                break
            if done:
                entries = [self._entry(works[place], done, drafts[place], states[place])
                           for place in active]  # fmt: skip
                states |= zip(active, self._run(entries), strict=True)
            best = self._best(torch.stack([states[place] for place in active]))
            for place, token in zip(active, best, strict=True):
                drafts[place][done] = token
        return drafts

    def finish(self) -> None:
        """Do nothing: it ends with rank 0, which measures it."""

    def clear(self) -> None:
        """Forget all sequences."""
        self._sequences.clear()

    def _entry(self, work: DraftWork, done: int, draft: Sequence[int], state: Tensor) -> _Entries:
        """Return the entry behind which the next draft token comes; ``done`` of them are known."""
        first = work.tokens - 2 + done
        return _Entries(work.blocks, first, draft[done - 1 : done], state[None])

    def _catch_up(self, found: Sequence[_Sequence], tokens: Sequence[Sequence[int]]) -> None:
        """Compute the entries that wait, of several sequences together."""
        if not found:
            return
        entries = []
        for own, ids in zip(found, tokens, strict=True):
            states = own.states[0] if len(own.states) == 1 else torch.cat(own.states)
            end = own.first + len(states)
            entries.append(_Entries(own.blocks, own.first, ids[own.first + 1 : end + 1], states))
        made = self._run(entries)  # of the last entry of each
        for own, one, last in zip(found, entries, made, strict=True):
            own.first, own.states, own.last = own.first + len(one.states), [], last

    def _run(self, entries: Sequence[_Entries]) -> Tensor:
        """Compute entries; return the state of the last one of each sequence ``[R, H]``."""
        ids = torch.tensor([token for one in entries for token in one.tokens])
        device = self._runner.device
        embedded = self._master.embed(ids[None].to(device), self._positions(entries))
        states = torch.cat([one.states for one in entries])[None]
        hidden = self._runner.run(self._ends.inputs(embedded, states), self._rows(entries))
        counts = torch.tensor([len(one.tokens) for one in entries])
        last = hidden[:, (counts.cumsum(0) - 1).to(device)]
        return self._ends.outputs(last)[0]

    def _rows(self, entries: Sequence[_Entries]) -> list[Row]:
        """Return the rows of entries: one of each, where they are few enough for a decode step."""
        count = sum(len(one.tokens) for one in entries)
        rows = []
        for one in entries:
            end = one.first + len(one.tokens)
            width = 1 if count <= MAX_STEP_TOKENS else len(one.tokens)
            rows += [
                Row(
                    blocks=tuple(one.blocks[: -(-(at + width) // self._block_size)]),
                    first=at,
                    length=at + width,
                )
                for at in range(one.first, end, width)
            ]
        return rows

    def _positions(self, entries: Sequence[_Entries]) -> Tensor:
        ranges = [torch.arange(one.first, one.first + len(one.tokens)) for one in entries]
        return torch.cat(ranges)[None]

    def _best(self, states: Tensor) -> list[int]:
        """Return the most likely token after each state ``[R, H]``."""
        best: list[int] = self._master.scores(states).argmax(dim=-1).tolist()
        return best
