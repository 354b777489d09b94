"""Blocks of keys and values in layers with windows: a sequence holds those that it still reads.

They are apart from the blocks of the other layers, with a table as long. A block before the window
of all later tokens is released; it stays cached until it is allocated again. A prefix is found only
if the window before its end is here, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmpq.batching.blocks import BlockAllocator, BlockKey
from llmpq.batching.engine_step import EngineLimits, EngineSequence


class WindowBlocks:
    """Allocates the blocks of layers with windows.

    Args:
        limits: of the engine; ``window_tokens`` is set.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._size = limits.block_size
        self._allocator = BlockAllocator(limits.num_window_blocks)

    @property
    def num_free(self) -> int:
        """Blocks without a user."""
        return self._allocator.num_free

    def longest_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Return how many blocks of a prefix can be reused: the window before its end is cached."""
        longest = run = 0
        for place, key in enumerate(keys):
            run = run + 1 if self._allocator.block_of(key) is not None else 0
            if run > place - self._first_seen((place + 1) * self._size):
                longest = place + 1
        return longest

    def start(self, sequence: EngineSequence, keys: Sequence[BlockKey]) -> None:
        """Let a sequence hold the window before the end of a prefix that was found."""
        first = self._first_seen(len(keys) * self._size)
        found = [self._allocator.block_of(key) for key in keys[first:]]
        shared = [block for block in found if block is not None]
        assert len(shared) == len(found)
        sequence.window_blocks = [0] * first + self._allocator.allocate(0, shared)
        sequence.window_first = first
        sequence.window_table = tuple(sequence.window_blocks)

    def advance(self, sequence: EngineSequence, first: int, end: int) -> bool:
        """Move on to the tokens ``[first, end)``: release what they do not read, allocate the rest.

        Returns:
            Whether enough blocks were free.
        """
        kept = min(self._first_seen(first), len(sequence.window_blocks))
        if kept > sequence.window_first:
            self._allocator.free(sequence.window_blocks[sequence.window_first : kept])
            sequence.window_first = kept
        missing = self._limits.blocks_for(end) - len(sequence.window_blocks)
        if missing > self.num_free:
            return False
        if missing > 0:
            sequence.window_blocks += self._allocator.allocate(missing)
            sequence.window_table = tuple(sequence.window_blocks)
        return True

    def most_more(self, sequence: EngineSequence) -> int:
        """Return the tokens that a sequence can grow by with the free blocks."""
        blocks = len(sequence.window_blocks) + self.num_free
        return blocks * self._size - sequence.tokens

    def cache(self, sequence: EngineSequence, place: int, key: BlockKey) -> None:
        """Record the content of the full block ``place`` of a sequence, if it holds it."""
        if place >= sequence.window_first:
            self._allocator.cache(sequence.window_blocks[place], key)

    def release(self, sequence: EngineSequence) -> None:
        """Release all blocks of a sequence."""
        self._allocator.free(sequence.window_blocks[sequence.window_first :])
        sequence.window_blocks, sequence.window_table, sequence.window_first = [], (), 0

    def _first_seen(self, position: int) -> int:
        """Return the first block that a token at ``position`` or later reads."""
        window = self._limits.window_tokens
        assert window is not None
        return max(0, position - window + 1) // self._size
