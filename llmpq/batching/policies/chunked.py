"""Iteration-level batching with chunked prefill, as vLLM schedules (its V1 engine).

Every iteration has a budget of tokens. Sequences that run come first, one token each or the next
chunk of their prompt; what is left goes to waiting requests, whose prompts may be cut. KV memory is
in blocks: a sequence that needs one when none is free makes the youngest sequence give up all of
its own and wait at the head of the queue, to be computed again. One whose last token is being made
gives up its blocks too, but has nothing left to wait for.

The scheduler is told arrivals and ends and knows neither tokens nor seconds. Iterations may be
scheduled before those ahead of them have been computed: how long an answer may be is known.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from llmpq.batching.kv_blocks import BlockPool
from llmpq.errors import CapacityError


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLimits:
    """What bounds an iteration.

    Attributes:
        tokens: of all sequences in one iteration.
        sequences: that run at once.
        blocks: of KV memory.
        block_tokens: tokens of a block.
    """

    tokens: int
    sequences: int
    blocks: int
    block_tokens: int


class Chunk(NamedTuple):
    """Tokens ``[start, start + tokens)`` of a request; ``makes_token`` when they are its last."""

    request: int
    start: int
    tokens: int
    makes_token: bool


@dataclass(slots=True, kw_only=True)
class _Sequence:
    request: int
    prompt_tokens: int
    new_tokens: int
    made: int = 0  # tokens of the answer, scheduled ones counted
    computed: int = 0  # tokens whose keys and values are in blocks, scheduled ones counted
    blocks: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.made


class ChunkedScheduler:
    """Decides iteration after iteration.

    Args:
        limits: of an iteration.
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
            CapacityError: it does not fit into the memory there is.
        """
        if self._blocks_for(prompt_tokens + new_tokens) > self._limits.blocks:
            raise CapacityError(
                f"request {request}: {prompt_tokens} and {new_tokens} tokens need more than the "
                f"{self._limits.blocks} KV blocks there are"
            )
        self._waiting.append(
            _Sequence(request=request, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
        )

    def schedule(self) -> tuple[Chunk, ...]:
        """Return the next iteration; nothing when nobody can go on."""
        before = self.preemptions
        chunks, left = self._continue()
        if self.preemptions == before:
            chunks += self._admit(left)
        return tuple(chunks)

    def land(self, chunks: tuple[Chunk, ...]) -> tuple[int, ...]:
        """Take in an iteration; return the requests whose answers it completes."""
        ended = []
        for chunk in chunks:
            sequence = self._sequences.get(chunk.request)
            if sequence is None or sequence.made < sequence.new_tokens:
                continue
            if chunk.makes_token and chunk.start + chunk.tokens == sequence.tokens - 1:
                if sequence in self._running:  # not when it has given up its blocks
                    self._running.remove(sequence)
                    self._pool.release(sequence.blocks)
                del self._sequences[chunk.request]
                ended.append(chunk.request)
        return tuple(ended)

    def _continue(self) -> tuple[list[Chunk], int]:
        """Schedule those that run, the oldest first; return also the tokens left."""
        chunks: list[Chunk] = []
        left, index = self._limits.tokens, 0
        while index < len(self._running) and left > 0:
            sequence = self._running[index]
            index += 1
            if sequence.made == sequence.new_tokens:
                continue  # its last token is being made
            tokens = min(sequence.tokens - sequence.computed, left)
            if not self._make_room(sequence, tokens):
                break
            chunks.append(self._advance(sequence, tokens))
            left -= tokens
        return chunks, left

    def _make_room(self, sequence: _Sequence, tokens: int) -> bool:
        """Give a sequence the blocks it needs, from the youngest if need be."""
        missing = self._blocks_for(sequence.computed + tokens) - len(sequence.blocks)
        while missing > self._pool.free:
            victim = self._running.pop()
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += self._pool.take(max(0, missing))
        return True

    def _preempt(self, victim: _Sequence) -> None:
        self._pool.release(victim.blocks)
        if victim.made == victim.new_tokens:
            return  # its last token is being made by an iteration ahead of whoever takes the blocks
        victim.blocks, victim.computed = [], 0
        del self._sequences[victim.request]
        self._waiting.appendleft(victim)
        self.preemptions += 1

    def _admit(self, left: int) -> list[Chunk]:
        """Take waiting requests in order, each only when all of its tokens fit."""
        chunks: list[Chunk] = []
        while self._waiting and left > 0 and len(self._running) < self._limits.sequences:
            sequence = self._waiting[0]
            # The last token is computed in any case: its output is what is wanted.
            kept = self._pool.found(
                sequence.request, (sequence.tokens - 1) // self._limits.block_tokens
            )
            if self._blocks_for(sequence.tokens) > self._pool.free:
                break
            self._waiting.popleft()
            sequence.computed = len(kept) * self._limits.block_tokens
            tokens = min(sequence.tokens - sequence.computed, left)
            missing = self._blocks_for(sequence.computed + tokens) - len(kept)
            sequence.blocks = self._pool.take(missing, kept)
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
            self._pool.fill(sequence.blocks[index], (sequence.request, index))
        makes_token = sequence.computed == sequence.tokens
        sequence.made += makes_token
        return Chunk(sequence.request, start, tokens, makes_token)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._limits.block_tokens)
