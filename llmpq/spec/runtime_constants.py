"""Sizes that the runtime uses and the cost model counts."""

from __future__ import annotations

from typing import Final

SHARED_FROM_BYTES: Final = 256 * 1024
"""Payloads from this size on lie in memory that the ranks of one host share."""
SHARED_BUFFERS: Final = 2
"""Payloads of one link that can be under way, or in the reader's hands, at once."""
MATRICES_UNDER_WAY: Final = 3
"""16-bit matrices counted for loading, in addition to what is placed: one being read, one being
quantized, and temporaries."""
MAPPED_FROM_BYTES: Final = 16 * 1024 * 1024
"""While serving, larger blocks are mapped on their own. In the heap, holes of that size made the
peak of one plan differ by 190 MB between runs."""
KV_BLOCK_TOKENS: Final = 128
"""Tokens whose keys and values are quantized at a time."""
KV_CODE_BITS: Final = (4, 8)
"""Bits of a cached key or value where it is quantized."""
SCORE_BLOCK_TOKENS: Final = 64
"""Queries whose scores, bias or mask are materialized at a time."""
DECODE_PROGRAMS: Final = 1024
"""Programs that decode attention aims at on a GPU, by splitting the keys of rows."""
MAX_DECODE_SPLITS: Final = 64
"""Most parts that the keys of a row are split into."""
MAX_DECODE_FEATURES: Final = 512
"""Most features of a key or a value there: a tile of them is in shared memory."""
ACTIVATION_BLOCK_VALUES: Final = 2**18
"""Values to which a stepwise activation is applied at a time."""
ROW_BLOCK: Final = 256
"""Tokens that a feed-forward or an expert computes at a time on a CPU. The tensors between its
operators are several times as wide as hidden states."""
STEP_ROWS: Final = 512
"""Most tokens that a compiled step takes through all layers at a time, on a CPU."""
STEP_SLOTS: Final = 4096
"""Most choices of experts of these tokens."""
HOST_LINK_SLOTS: Final = 2
"""Places in the memory of a host for rows of an accelerator: the device reads one while the host
writes the other."""
HEAD_LANES: Final = 16
"""The attention kernel that reads blocks in place takes heads of a multiple of this size."""
MAX_PAGED_HEAD_DIM: Final = 576
"""Largest head of that kernel."""
HEAD_ROW_MULTIPLE: Final = 16
"""Rows of a quantized head are filled up to a multiple of it, which the compiled kernels need."""
PANEL_ROWS: Final = 64
"""Rows of a 16-bit head on a CPU are filled up to a multiple of it: whole panels everywhere."""
PANEL_COLUMNS: Final = 32
"""Weights of 16 bits with a multiple of so many columns are kept in panels on a CPU."""
KV_BLOCK_SIZE: Final = 16
"""Tokens of a block of keys and values."""
KV_FILE_HEADER_BYTES: Final = 128
"""A file with a block begins with so many bytes."""
PROMPT_CHUNK_TOKENS: Final = 1024
"""Most tokens of a sequence that layers compute at a time; a longer prompt takes several passes.
Also the tokens of a step of the engine that serves, where no other number is given."""
STREAM_BUFFERS: Final = 2
"""Layers with weights on disk that are in memory at a time: the one computed, and the next."""

MAX_CHOICES: Final = 2048
"""Most answers of a request to a server, unless told otherwise: its prompts times ``n``."""
POLL_S: Final = 0.1
"""Seconds between two readings of the statistics of replicas: ten a second, as in SAL's paper."""
FIRST_BYTE_S: Final = 60.0
"""Seconds to the first byte of a streamed answer, after which another replica is tried."""
MIN_STATE_SLOTS: Final = 3
"""States of a plan at least, in layers that keep one: beside the state of a single running sequence
a saved one, with which the next turn of a conversation goes on, and one for draft tokens."""


def state_slots(sequences: int) -> int:
    """Return the states that a plan of so many sequences keeps in a layer with a state."""
    return max(sequences, MIN_STATE_SLOTS) if sequences else 0


def decode_splits(rows: int, kv_heads: int) -> int:
    """Return into how many parts decode attention on a GPU splits the keys of each row.

    A power of two, for about ``DECODE_PROGRAMS`` programs, of which a processor runs several at
    once: rows have different lengths.
    """
    wanted = min(MAX_DECODE_SPLITS, max(1, DECODE_PROGRAMS // (rows * kv_heads)))
    return 1 << (wanted.bit_length() - 1)


def kept_blocks(
    tokens: int,
    window: int | None,
    block_size: int = KV_BLOCK_SIZE,
    chunk: int = PROMPT_CHUNK_TOKENS,
) -> int:
    """Return the blocks of a sequence of ``tokens`` in a layer whose queries see ``window`` tokens.

    A chunk reads the window before it, wherever a block begins; what is left of it is freed.

    Args:
        tokens: of the sequence.
        window: that a query sees, itself included; ``None`` for all.
        block_size: tokens of a block.
        chunk: most tokens of a sequence in a step.
    """
    blocks = -(-tokens // block_size)
    if window is None:
        return blocks
    return min(blocks, -(-(window - 1 + chunk) // block_size) + 1)
