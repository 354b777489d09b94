"""Iteration-level batching with chunked prefill, like the V1 engine of vLLM.

Every iteration has a token budget. Running sequences come first, with one token or the next chunk
of their prompt; the rest of the budget goes to waiting requests, whose prompts may be chunked. KV
memory is in blocks: if none is free, the newest sequence is preempted, releases its blocks and
returns to the head of the queue to be recomputed. If its last token is already scheduled, it only
releases its blocks.

Iterations may be scheduled before earlier ones are computed, because the answer length is given.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from llmpq.batching.kv_blocks import BlockPool
from llmpq.errors import CapacityError


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLimits:
    """Limits of an iteration.

    Attributes:
        tokens: tokens of all sequences in one iteration.
        sequences: running sequences.
        blocks: blocks of KV memory.
        block_tokens: tokens of a block.
    """

    tokens: int
    sequences: int
    blocks: int
    block_tokens: int


class Chunk(NamedTuple):
    """Tokens ``[start, start + tokens)`` of a request; ``makes_token`` if they are its last."""

    request: int
    start: int
    tokens: int
    makes_token: bool


@dataclass(slots=True, kw_only=True)
class _Sequence:
    request: int
    prompt_tokens: int
    new_tokens: int
    made: int = 0  # answer tokens, including scheduled ones
    computed: int = 0  # tokens with keys and values in blocks, including scheduled ones
    blocks: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.made


class ChunkedScheduler:
    """Schedules the iterations of one worker.

    Args:
        limits: limits of an iteration.
    """

    def __init__(self, limits: ChunkLimits) -> None:
        self._limits = limits
        self._pool = BlockPool(limits.blocks)
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._sequences: dict[int, _Sequence] = {}
        self.preemptions = 0

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    def arrive(self, request: int, prompt_tokens: int, new_tokens: int) -> None:
        """Put a request at the end of the queue.

        Raises:
            CapacityError: it does not fit into the KV memory.
        """
        if self._blocks_for(prompt_tokens + new_tokens) > self._limits.blocks:
            raise CapacityError(
                f"request {request}: {prompt_tokens} and {new_tokens} tokens need more than the "
                f"{self._limits.blocks} KV blocks available"
            )
        self._waiting.append(
            _Sequence(request=request, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
        )

    def schedule(self) -> tuple[Chunk, ...]:
        """Return the next iteration; empty if no sequence can run."""
        before = self.preemptions
        chunks, left = self._continue()
        if self.preemptions == before:
            chunks += self._admit(left)
        return tuple(chunks)

    def complete(self, chunks: tuple[Chunk, ...]) -> tuple[int, ...]:
        """Complete an iteration; return the requests that it finishes."""
        ended = []
        for chunk in chunks:
            sequence = self._sequences.get(chunk.request)
            if sequence is None or sequence.made < sequence.new_tokens:
                continue
            if chunk.makes_token and chunk.start + chunk.tokens == sequence.tokens - 1:
                if sequence in self._running:  # not if it was preempted
                    self._running.remove(sequence)
                    self._pool.release(sequence.blocks)
                del self._sequences[chunk.request]
                ended.append(chunk.request)
        return tuple(ended)

    def _continue(self) -> tuple[list[Chunk], int]:
        """Schedule running sequences, the oldest first; return also the remaining tokens."""
        chunks: list[Chunk] = []
        left, index = self._limits.tokens, 0
        while index < len(self._running) and left > 0:
            sequence = self._running[index]
            index += 1
            if sequence.made == sequence.new_tokens:
                continue  # its last token is scheduled
            tokens = min(sequence.tokens - sequence.computed, left)
            if not self._make_room(sequence, tokens):
                break
            chunks.append(self._advance(sequence, tokens))
            left -= tokens
        return chunks, left

    def _make_room(self, sequence: _Sequence, tokens: int) -> bool:
        """Allocate the blocks of a sequence; preempt the newest sequences if necessary."""
        missing = self._blocks_for(sequence.computed + tokens) - len(sequence.blocks)
        while missing > self._pool.free:
            victim = self._running.pop()
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += self._pool.allocate(max(0, missing))
        return True

    def _preempt(self, victim: _Sequence) -> None:
        self._pool.release(victim.blocks)
        if victim.made == victim.new_tokens:
            return  # its last token is computed before the blocks are reused
        victim.blocks, victim.computed = [], 0
        del self._sequences[victim.request]
        self._waiting.appendleft(victim)
        self.preemptions += 1

    def _admit(self, left: int) -> list[Chunk]:
        """Start waiting requests in order, each only if all of its tokens fit."""
        chunks: list[Chunk] = []
        while self._waiting and left > 0 and len(self._running) < self._limits.sequences:
            sequence = self._waiting[0]
            # The last token is always computed: its output is needed.
            kept = self._pool.cached(
                sequence.request, (sequence.tokens - 1) // self._limits.block_tokens
            )
            if self._blocks_for(sequence.tokens) > self._pool.free:
                break
            self._waiting.popleft()
            sequence.computed = len(kept) * self._limits.block_tokens
            tokens = min(sequence.tokens - sequence.computed, left)
            missing = self._blocks_for(sequence.computed + tokens) - len(kept)
            sequence.blocks = self._pool.allocate(missing, kept)
            self._running.append(sequence)
            self._sequences[sequence.request] = sequence
            chunks.append(self._advance(sequence, tokens))
            left -= tokens
        return chunks

    def _advance(self, sequence: _Sequence, tokens: int) -> Chunk:
        start = sequence.computed
        sequence.computed += tokens
        size = self._limits.block_tokens
        for index in range(start // size, sequence.computed // size):
            self._pool.set_content(sequence.blocks[index], (sequence.request, index))
        makes_token = sequence.computed == sequence.tokens
        sequence.made += makes_token
        return Chunk(sequence.request, start, tokens, makes_token)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._limits.block_tokens)
