"""KV memory in blocks shared by all sequences (PagedAttention, as in vLLM).

A freed block keeps its content until it is allocated again, so that a preempted sequence can reuse
the keys and values of its prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from llmpq.errors import CapacityError, LlmpqError

Content = tuple[int, int]
"""A request and the index of a full block of its tokens."""


class BlockPool:
    """Free blocks and the content they last held.

    Args:
        num_blocks: number of blocks.

    Raises:
        CapacityError: ``num_blocks`` is less than 1.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise CapacityError(f"KV blocks: found {num_blocks}, expected at least 1")
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._content: dict[int, Content] = {}
        self._block_of: dict[Content, int] = {}

    @property
    def free(self) -> int:
        """Blocks without an owner."""
        return len(self._free)

    def cached(self, request: int, most: int) -> list[int]:
        """Return the free blocks that hold the first blocks of a request, at most ``most``."""
        blocks: list[int] = []
        while len(blocks) < most:
            block = self._block_of.get((request, len(blocks)))
            if block is None or block not in self._free:
                break
            blocks.append(block)
        return blocks

    def allocate(self, count: int, kept: Sequence[int] = ()) -> list[int]:
        """Allocate the free blocks ``kept`` and ``count`` others, the least recently freed first.

        Raises:
            LlmpqError: fewer than ``count`` blocks are free.
        """
        for block in kept:
            del self._free[block]
        if count > len(self._free):
            raise LlmpqError(f"KV blocks: {count} wanted, {len(self._free)} free")
        fresh = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in fresh:
            content = self._content.pop(block, None)
            if content is not None:
                del self._block_of[content]
        return [*kept, *fresh]

    def set_content(self, block: int, content: Content) -> None:
        """Record the content of a full block."""
        if self._content.get(block) == content:
            return
        self._content[block] = content
        self._block_of[content] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Free the blocks of a sequence; its last block is allocated again first."""
        for block in reversed(blocks):
            if block in self._free:
                raise LlmpqError(f"KV blocks: block {block} is released but not allocated")
            self._free[block] = None
