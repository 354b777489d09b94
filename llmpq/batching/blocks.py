"""KV memory in blocks with prefix caching (PagedAttention, as in vLLM), without tensors.

A block is free, or it has one or more users. Several sequences may use a block only if it is full
and found by its key, so a block that is still written has exactly one user. A key is a hash of all
tokens from the start of the sequence to the end of the block. A free block keeps its content until
it is allocated again; blocks without content are allocated first, then the least recently used.
Then its content may be copied to host memory, and from there to disk (``OffloadedBlocks``), where
it is found, too: it is loaded into another block.

A block table lists the blocks that hold the tokens of a sequence. A slot is a fixed run of blocks.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from llmpq.errors import CapacityError, LlmpqError
from llmpq.spec.runtime_constants import KV_BLOCK_SIZE, kept_blocks

BlockKey = Hashable
"""Identifies the content of a full block and of all blocks before it."""
Tier = Literal["blocks", "host", "disk"]
"""Where content is: in a KV block, in host memory, in a file."""


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


def keys_of(token_ids: Sequence[int], parent: bytes, block_size: int) -> list[BlockKey]:
    """Return the keys of the full blocks of tokens that follow a block.

    Args:
        token_ids: the tokens.
        parent: key of the block before them, or the root key.
        block_size: tokens of a block.
    """
    keys: list[BlockKey] = []
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = next_key(parent, token_ids[end - block_size : end])
        keys.append(parent)
    return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadLimits:
    """Copies of KV blocks that an engine keeps beyond its blocks.

    Attributes:
        host_blocks, disk_blocks: in host memory and on disk.
        host_window_blocks, disk_window_blocks: those of layers with windows, where these have
            blocks of their own.
    """

    host_blocks: int = 0
    disk_blocks: int = 0
    host_window_blocks: int = 0
    disk_window_blocks: int = 0

    @property
    def sizes(self) -> tuple[int, int]:
        """Most copies in host memory and on disk."""
        return self.host_blocks, self.disk_blocks

    @property
    def window_sizes(self) -> tuple[int, int]:
        """Those of layers with windows."""
        return self.host_window_blocks, self.disk_window_blocks


NOTHING_KEPT = OffloadLimits()


class BlockCopy(NamedTuple):
    """A block's content to copy from one place to another, on every stage.

    Attributes:
        source, source_place: where the content is.
        target, target_place: where it is to be, too.
        key: of the content.
        has_window: whether these are places of layers with windows that have blocks of their own.
    """

    source: Tier
    source_place: int
    target: Tier
    target_place: int
    key: BlockKey
    has_window: bool


class OffloadedBlocks:
    """Copies of blocks in host memory and on disk, found by their keys, without tensors.

    The least recently used copy in host memory gives way to a new one and goes to the disk; the
    least recently used one on disk is lost. What is loaded into a block stays where it was, so that
    it need not be copied when the block is allocated again.

    Args:
        sizes: most copies in each tier, the nearest first.
        copies: receives what is to be copied. All of it is copied in this order, before the blocks
            that it names are read or written by a step.
        has_window: as in ``BlockCopy``.

    Attributes:
        num_saved, num_loaded: copies made so far to and from each tier.
    """

    def __init__(
        self, sizes: Sequence[tuple[Tier, int]], copies: list[BlockCopy], *, has_window: bool
    ) -> None:
        self._tiers = [(tier, size) for tier, size in sizes if size]
        self._copies = copies
        self._has_window = has_window
        self._places: dict[Tier, OrderedDict[BlockKey, int]] = {
            tier: OrderedDict() for tier, _ in sizes
        }  # least recently used first
        self._held: dict[BlockKey, tuple[Tier, int]] = {}  # to load: their places are not taken
        self._free = {tier: list(range(size - 1, -1, -1)) for tier, size in self._tiers}
        self.num_saved = dict.fromkeys(self._places, 0)
        self.num_loaded = dict.fromkeys(self._places, 0)

    def restore(self, tier: Tier, stored: Iterable[tuple[BlockKey, int]]) -> None:
        """Find content that the engine before has left.

        Args:
            tier: where it is; nothing else is there.
            stored: keys and places, the least recently used one first.
        """
        size = dict(self._tiers).get(tier, 0)
        self._places[tier].update((key, place) for key, place in stored if place < size)
        taken = set(self._places[tier].values())
        self._free[tier] = [place for place in range(size - 1, -1, -1) if place not in taken]

    def tier_of(self, key: BlockKey) -> Tier | None:
        """Return the nearest tier that has this content, ``None`` if none has."""
        return next((tier for tier, _ in self._tiers if key in self._places[tier]), None)

    def count(self, tier: Tier) -> int:
        """Return the copies in a tier."""
        return len(self._places[tier])

    def hold(self, keys: Iterable[BlockKey]) -> None:
        """Keep the places of content that is about to be loaded."""
        for key in keys:
            tier = self.tier_of(key)
            assert tier is not None, "it was found"
            self._held[key] = tier, self._places[tier].pop(key)

    def load(self, block: int, key: BlockKey) -> None:
        """Copy held content into a block."""
        tier, place = self._held[key]
        self.num_loaded[tier] += 1
        self._copies.append(BlockCopy(tier, place, "blocks", block, key, self._has_window))

    def release(self) -> None:
        """Let go of what was held: it has been used, the end of a prefix longest ago."""
        while self._held:
            key, (tier, place) = self._held.popitem()
            self._places[tier][key] = place

    def save(self, block: int, key: BlockKey) -> None:
        """Keep the content of a block that is allocated again."""
        self._put(0, key, "blocks", block)

    def forget(self, key: BlockKey) -> None:
        """Remove content that cannot be read."""
        for tier, _ in self._tiers:
            place = self._places[tier].pop(key, None)
            if place is not None:
                self._free[tier].append(place)

    def _put(self, level: int, key: BlockKey, source: Tier, source_place: int) -> None:
        """Copy content to a tier, unless it is there; what gives way goes to the next one."""
        if level == len(self._tiers):
            return
        tier = self._tiers[level][0]
        places = self._places[tier]
        if key in places:
            places.move_to_end(key)
            return
        if self._free[tier]:
            place = self._free[tier].pop()
        elif places:
            oldest, place = places.popitem(last=False)
            self._put(level + 1, oldest, tier, place)
        else:  # all of it is about to be loaded
            self._put(level + 1, key, source, source_place)
            return
        places[key] = place
        self.num_saved[tier] += 1
        self._copies.append(BlockCopy(source, source_place, tier, place, key, self._has_window))


class BlockAllocator:
    """Allocates the KV blocks ``0 .. num_blocks - 1`` of one engine.

    Args:
        num_blocks: number of blocks.
        offloaded: keeps the content of blocks that are allocated again; ``None`` forgets it.

    Raises:
        CapacityError: ``num_blocks`` is less than 1.
    """

    def __init__(self, num_blocks: int, offloaded: OffloadedBlocks | None = None) -> None:
        if num_blocks < 1:
            raise CapacityError(f"KV blocks: found {num_blocks}, expected at least 1")
        self.num_blocks = num_blocks
        self._offloaded = offloaded
        self._users = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))  # free, without content
        self._reusable: OrderedDict[int, None] = OrderedDict()  # free, least recently used first
        self._key: dict[int, BlockKey] = {}
        self._block: dict[BlockKey, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks without a user."""
        return len(self._empty) + len(self._reusable)

    def find(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Return the longest prefix of ``keys`` whose content is cached, in any tier."""
        for count, key in enumerate(keys):
            if key not in self._block and self.tier_of(key) is None:
                return keys[:count]
        return keys

    def tier_of(self, key: BlockKey) -> Tier | None:
        """Return the nearest tier that has this content, ``None`` where it is not cached."""
        if key in self._block:
            return "blocks"
        return None if self._offloaded is None else self._offloaded.tier_of(key)

    def count_taken(self, keys: Sequence[BlockKey]) -> int:
        """Return how many free blocks a prefix takes: those that have it or that it is loaded into.

        Args:
            keys: returned by :meth:`find`.
        """
        blocks = (self._block.get(key) for key in keys)
        return sum(block is None or not self._users[block] for block in blocks)

    def allocate(self, count: int, prefix: Sequence[BlockKey] = ()) -> list[int]:
        """Return the blocks of a prefix with one more user each, and ``count`` of one user.

        What is not in a block is loaded into one; :meth:`forget` says that this failed.

        Args:
            count: number of blocks to write.
            prefix: keys returned by :meth:`find`.

        Raises:
            LlmpqError: fewer than ``count`` other blocks are free; nothing is changed.
        """
        available = self.num_free - self.count_taken(prefix)
        if count > available:
            raise LlmpqError(f"KV blocks: found {available} free, expected {count}")
        shared = {key: self._block[key] for key in prefix if key in self._block}
        for block in shared.values():
            self._users[block] += 1
            self._reusable.pop(block, None)
        if len(shared) == len(prefix):
            return [*shared.values(), *(self._new() for _ in range(count))]
        assert self._offloaded is not None, "the rest was found there"
        self._offloaded.hold(key for key in prefix if key not in shared)
        blocks = [shared[key] if key in shared else self._new() for key in prefix]
        blocks += [self._new() for _ in range(count)]
        for block, key in zip(blocks, prefix, strict=False):
            if key not in shared:
                self._offloaded.load(block, key)
                self.cache(block, key)
        self._offloaded.release()
        return blocks

    def cache(self, block: int, key: BlockKey) -> None:
        """Record the content of a full block in use, unless another block has the same content."""
        if not self._users[block]:
            raise LlmpqError(f"KV blocks: block {block} is cached but not allocated")
        if block not in self._key and key not in self._block:
            self._key[block] = key
            self._block[key] = block

    def forget(self, key: BlockKey) -> None:
        """Forget content in use that could not be loaded."""
        assert self._offloaded is not None, "nothing is loaded without"
        del self._key[self._block.pop(key)]
        self._offloaded.forget(key)

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

    def _new(self) -> int:
        """Return a free block with one user, without content."""
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._reusable.popitem(last=False)
            key = self._key.pop(block)
            del self._block[key]
            if self._offloaded is not None:
                self._offloaded.save(block, key)
        self._users[block] = 1
        return block


class StateSlots:
    """Allocates the slots of states, in layers with a recurrent state.

    A slot has a sequence, or it is free. A free slot may have a saved state: that at the end of a
    block, found by the block's key until the slot is allocated again. Slots without are allocated
    first, then the least recently used.

    Args:
        num_slots: of running sequences and saved states together.
    """

    def __init__(self, num_slots: int) -> None:
        self._empty = list(range(num_slots - 1, -1, -1))
        self._saved: OrderedDict[BlockKey, int] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        """Slots without a sequence."""
        return len(self._empty) + len(self._saved)

    def has(self, key: BlockKey) -> bool:
        """Return whether the state at the end of a block is saved."""
        return key in self._saved

    def find(self, key: BlockKey) -> int:
        """Return the slot of a saved state, which is the most recently used one now."""
        self._saved.move_to_end(key)
        return self._saved[key]

    def allocate(self) -> int:
        """Return a free slot, which has no saved state any more."""
        return self._empty.pop() if self._empty else self._saved.popitem(last=False)[1]

    def free(self, slot: int) -> None:
        """Take back the slot of a sequence."""
        self._empty.append(slot)

    def save(self, key: BlockKey) -> int:
        """Return the slot for a state; -1 where it is saved already, or no slot is free."""
        if key in self._saved:
            self._saved.move_to_end(key)
        elif self.num_free:
            self._saved[key] = self.allocate()
            return self._saved[key]
        return -1

    def forget(self, key: BlockKey) -> None:
        """Remove a saved state, if there is one."""
        slot = self._saved.pop(key, None)
        if slot is not None:
            self._empty.append(slot)


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
