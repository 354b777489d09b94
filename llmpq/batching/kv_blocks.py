"""KV memory in blocks, shared by all sequences, as vLLM keeps it (PagedAttention).

A freed block keeps its content until it is given out again, so that a sequence which was preempted
may find the beginning of its keys and values still there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from llmpq.errors import CapacityError, LlmpqError

Content = tuple[int, int]
"""A request and the index of a full block of its tokens."""


class BlockPool:
    """Which blocks are free, and what they last held.

    Args:
        num_blocks: all there are.

    Raises:
        CapacityError: there are none.
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

    def found(self, request: int, most: int) -> list[int]:
        """Return the free blocks that still hold the beginning of a request, in order."""
        blocks: list[int] = []
        while len(blocks) < most:
            block = self._block_of.get((request, len(blocks)))
            if block is None or block not in self._free:
                break
            blocks.append(block)
        return blocks

    def take(self, count: int, kept: Sequence[int] = ()) -> list[int]:
        """Give out ``kept`` as they are, and ``count`` others, the longest free first.

        Raises:
            LlmpqError: there are fewer.
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

    def fill(self, block: int, content: Content) -> None:
        """Note what a full block holds."""
        if self._content.get(block) == content:
            return
        self._content[block] = content
        self._block_of[content] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Free a sequence's blocks; its last one is given out first."""
        for block in reversed(blocks):
            if block in self._free:
                raise LlmpqError(f"KV blocks: block {block} is released although nobody owns it")
            self._free[block] = None
