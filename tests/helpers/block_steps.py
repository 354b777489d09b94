"""A step runner whose KV blocks hold token ids: it shows what a block table really leads to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from helpers.tiny_models import load_reference

from llmpq.batching.blocks import BlockCopy
from llmpq.dist.engine.executor import StepResult
from llmpq.dist.transport.frames import Row
from llmpq.errors import StageError


class BlockSteps:
    """Computes the scores of a row from the tokens in its blocks, with transformers' own model.

    A block that has two owners, is stale or was never written gives other tokens, and other
    answers. Steps are computed when they are collected, in the order of dispatch.
    """

    def __init__(self, model_dir: Path, num_blocks: int, block_size: int, most: int = 1) -> None:
        self.model = load_reference(model_dir)
        self.block_size = block_size
        self.cells = np.full((num_blocks, block_size), -1)
        self.most = most
        self.steps: deque[tuple[int, list[list[int]], Sequence[int], Sequence[int]]] = deque()
        self.delay = 0  # calls of has_result before a step is back
        self.waits = 0
        self.kept: dict[tuple[str, int], np.ndarray] = {}  # beyond the blocks
        self.misses: Callable[[], bool] = lambda: False  # whether the next file is damaged
        self.known: dict[tuple[int, ...], torch.Tensor] = {}
        self.fails_at: int | None = None
        self.dispatched = 0
        self.most_in_flight = 0

    def dispatch(
        self, number, phase, token_ids: np.ndarray, rows: Sequence[Row], outputs, pooled=()
    ) -> None:
        assert phase is None
        self.dispatched += 1
        if self.fails_at == self.dispatched:
            raise StageError("stage 1: was ended by SIGKILL")
        assert len(self.steps) < self.most
        assert sum(row.length - row.first for row in rows) == len(token_ids)
        start = 0
        for row in rows:  # all keys and values are written before any row attends
            for position in range(row.first, row.length):
                block = row.blocks[position // self.block_size]
                self.cells[block, position % self.block_size] = token_ids[start]
                start += 1
        contexts = []
        for row in rows:
            held = self.cells[list(row.blocks)].reshape(-1)[: row.length]
            contexts.append([int(token) for token in held])
        self.steps.append((number, contexts, list(outputs), list(pooled)))
        self.most_in_flight = max(self.most_in_flight, len(self.steps))
        self.waits = self.delay

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> list[int]:
        """Copy tokens at once: the steps before have written theirs."""
        unread = []
        for place, copy in enumerate(copies):
            if copy.source == "blocks":
                tokens = self.cells[copy.source_place].copy()
            else:
                tokens = self.kept[copy.source, copy.source_place]
            if copy.source == "disk" and self.misses():
                unread.append(place)
            elif copy.target == "blocks":
                self.cells[copy.target_place] = tokens
            else:
                self.kept[copy.target, copy.target_place] = tokens
        return unread

    def has_result(self) -> bool:
        self.waits -= 1
        return bool(self.steps) and self.waits < 0

    def await_result(self, _: float) -> bool:
        self.waits = 0
        return True

    def collect(self) -> StepResult:
        number, contexts, outputs, pooled = self.steps.popleft()
        scores = [self.scores(tuple(contexts[row])) for row in outputs]
        states = [self.states(tuple(contexts[row]))[-1] for row in pooled]
        return StepResult(
            number, torch.stack(scores) if scores else None, torch.stack(states) if states else None
        )

    def end_step(self) -> None:
        """No time passes."""

    def check(self) -> None:
        assert not self.steps

    def states(self, tokens: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            return self.model.model(torch.tensor([tokens])).last_hidden_state[0].float()

    def scores(self, tokens: tuple[int, ...]) -> torch.Tensor:
        if tokens not in self.known:
            with torch.inference_mode():
                found = self.model(torch.tensor([tokens])).logits[0].float()
            for end in range(1, len(tokens) + 1):
                self.known.setdefault(tokens[:end], found[end - 1])
        return self.known[tokens]
