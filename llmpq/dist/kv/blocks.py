"""Block tables: which blocks of the KV cache hold the tokens of a sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmpq.spec.runtime_constants import KV_BLOCK_SIZE, kept_blocks


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
