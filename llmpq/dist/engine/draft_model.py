"""DraftModel: computes the draft tokens of a step with a small model and its own KV blocks.

Which sequences have drafts, how long, and in which blocks, is the scheduler's decision
(``llmpq.batching.draft_model``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from llmpq.batching.draft_model import FEW_TOKENS, DraftWork
from llmpq.dist.engine.packed_steps import StepRunner
from llmpq.dist.transport.frames import Row

CPU = torch.device("cpu")


class DraftModel:
    """Proposes the tokens that a small model finds most likely.

    Args:
        runner: of the small model; no other steps are in flight there.
        device: where it runs; the current one while it does.
        block_size: tokens of a KV block.
        token_budget: most tokens of a prompt in one pass.
    """

    def __init__(
        self,
        runner: StepRunner,
        *,
        device: torch.device = CPU,
        block_size: int,
        token_budget: int,
    ) -> None:
        self._runner = runner
        self._device = device
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
        with torch.accelerator.device_index(self._device.index):
            return self._propose(works, tokens)

    def _propose(
        self, works: Sequence[DraftWork], tokens: Sequence[Sequence[int]]
    ) -> list[list[int]]:
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

    def _catch_up(self, work: DraftWork, ids: Sequence[int]) -> int:
        """Compute a prompt but for its last token; return the first token that is not computed."""
        first = work.first
        if work.tokens - first <= FEW_TOKENS:
            return first
        while first < work.tokens - 1:
            end = min(first + self._token_budget, work.tokens - 1)
            self._runner.dispatch(np.array(ids[first:end]), [self._row(work, first, end)], [])
            self._runner.collect()
            first = end
        return first

    def _row(self, work: DraftWork, first: int, end: int) -> Row:
        blocks = work.blocks[: -(-end // self._block_size)]
        return Row(blocks=blocks, first=first, length=end)

    def _best(self, ids: Sequence[int], rows: Sequence[Row], outputs: Sequence[int]) -> list[int]:
        """Return the most likely token after each of some rows."""
        self._runner.dispatch(np.array(ids), rows, outputs)
        scores = self._runner.collect()
        assert scores is not None
        best: list[int] = scores.argmax(dim=-1).tolist()
        return best
