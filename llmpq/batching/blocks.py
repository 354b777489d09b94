"""KV memory in blocks with prefix caching (PagedAttention, as in vLLM), without tensors.

A block is free, or it has one or more users. Several sequences may use a block only if it is full
and found by its key, so a block that is still written has exactly one user. A key is a hash of all
tokens from the start of the sequence to the end of the block. A free block keeps its content until
it is allocated again; blocks without content are allocated first, then the least recently used.

A block table lists the blocks that hold the tokens of a sequence. A slot is a fixed run of blocks.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from llmpq.errors import CapacityError, LlmpqError
from llmpq.spec.runtime_constants import KV_BLOCK_SIZE, kept_blocks

BlockKey = Hashable
"""Identifies the content of a full block and of all blocks before it."""


def root_key(cache_salt: str, rope_table: int = 0) -> bytes:
    """Return the key before the first block.

    Sequences share blocks only under the same salt, and if their keys have the same rotary angles.
    """
    return hashlib.sha256(f"{rope_table} {cache_salt}".encode()).digest()


def next_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of a full block.

    Args:
        parent: key of the block before it, or the root key.
        token_ids: the tokens of the block.
    """
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


class BlockAllocator:
    """Allocates the KV blocks ``0 .. num_blocks - 1`` of one engine.

    Args:
        num_blocks: number of blocks.

    Raises:
        CapacityError: ``num_blocks`` is less than 1.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise CapacityError(f"KV blocks: found {num_blocks}, expected at least 1")
        self.num_blocks = num_blocks
        self._users = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))  # free, without content
        self._reusable: OrderedDict[int, None] = OrderedDict()  # free, least recently used first
        self._key: dict[int, BlockKey] = {}
        self._block: dict[BlockKey, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks without a user."""
        return len(self._empty) + len(self._reusable)

    def find(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return the blocks that hold the longest prefix of ``keys``, free or in use."""
        blocks: list[int] = []
        for key in keys:
            block = self._block.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def block_of(self, key: BlockKey) -> int | None:
        """Return the block with this content, free or in use; ``None`` where it is not cached."""
        return self._block.get(key)

    def count_free(self, blocks: Sequence[int]) -> int:
        """Return how many of these blocks are free."""
        return sum(not self._users[block] for block in blocks)

    def allocate(self, count: int, shared: Sequence[int] = ()) -> list[int]:
        """Return ``shared`` with one more user each, followed by ``count`` blocks of one user.

        Args:
            count: number of blocks to write.
            shared: blocks returned by :meth:`find`.

        Raises:
            LlmpqError: fewer than ``count`` other blocks are free; nothing is changed.
        """
        available = self.num_free - self.count_free(shared)
        if count > available:
            raise LlmpqError(f"KV blocks: found {available} free, expected {count}")
        for block in shared:
            self._users[block] += 1
            self._reusable.pop(block, None)
        blocks = [*shared]
        for _ in range(count):
            block = self._empty.pop() if self._empty else self._evict()
            self._users[block] = 1
            blocks.append(block)
        return blocks

    def cache(self, block: int, key: BlockKey) -> None:
        """Record the content of a full block in use, unless another block has the same content."""
        if not self._users[block]:
            raise LlmpqError(f"KV blocks: block {block} is cached but not allocated")
        if block not in self._key and key not in self._block:
            self._key[block] = key
            self._block[key] = block

    def free(self, blocks: Sequence[int]) -> None:
        """Remove one user from each block of a sequence.

        The blocks at its end are allocated again first, because a prefix is useless without its
        beginning.

        Raises:
            LlmpqError: a block is free already.
        """
        for block in reversed(blocks):
            if not self._users[block]:
                raise LlmpqError(f"KV blocks: block {block} is freed but not allocated")
            self._users[block] -= 1
            if self._users[block]:
                continue
            if block in self._key:
                self._reusable[block] = None
            else:
                self._empty.append(block)

    def _evict(self) -> int:
        block, _ = self._reusable.popitem(last=False)
        del self._block[self._key.pop(block)]
        return block


def blocks_of(tokens: int, block_size: int = KV_BLOCK_SIZE) -> int:
    """Return the blocks that a sequence of ``tokens`` takes."""
    return -(-tokens // block_size)


def slot_blocks(slot: int, max_tokens: int, tokens: int) -> tuple[int, ...]:
    """Return the blocks of the first ``tokens`` of a slot, a fixed run of consecutive blocks.

    Args:
        slot: its number.
        max_tokens: tokens of every slot.
        tokens: of the sequence that owns it.
    """
    first = slot * blocks_of(max_tokens)
    return tuple(range(first, first + blocks_of(tokens)))


def slot_window_blocks(slot: int, max_tokens: int, tokens: int, window: int) -> tuple[int, ...]:
    """Return the blocks of the first ``tokens`` of a slot in layers with windows.

    The slot has a fixed run of consecutive blocks, which are used in turn: the window before a
    chunk, and the chunk, have one each.

    Args:
        slot: its number.
        max_tokens: tokens of every slot.
        tokens: of the sequence that owns it.
        window: the largest of the model.
    """
    width = kept_blocks(max_tokens, window)
    return tuple(slot * width + place % width for place in range(blocks_of(tokens)))


def blocks_written_twice(rows: Iterable[tuple[Sequence[int], int, int]], block_size: int) -> bool:
    """Return whether two rows of (blocks, first, length) write to one block."""
    written = [
        block
        for table, first, length in rows
        for block in table[first // block_size : blocks_of(length, block_size)]
    ]
    return len(set(written)) != len(written)


def tokens_written_twice(rows: Sequence[tuple[Sequence[int], int, int]], block_size: int) -> bool:
    """Return whether two rows of (blocks, first, length) write to one place of one block."""
    if not blocks_written_twice(rows, block_size):
        return False
    places = [
        (table[position // block_size], position % block_size)
        for table, first, length in rows
        for position in range(first, length)
    ]
    return len(set(places)) != len(places)
