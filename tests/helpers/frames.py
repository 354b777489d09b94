"""Frames and their limits, small ones and ones with large payloads."""

from __future__ import annotations

import torch

from llmpq.batching.blocks import slot_blocks
from llmpq.dist.transport.frames import Frame, FrameKind, FrameLimits, Row

SMALL = FrameLimits(
    digest=b"12345678",
    num_blocks=2,
    max_context=8,
    prefill_rows=1,
    prefill_tokens=4,
    decode_rows=2,
    hidden_size=4,
    dtype=torch.float32,
)
LARGE = FrameLimits(
    digest=b"12345678",
    num_blocks=4 * 38,
    max_context=600,
    prefill_rows=4,
    prefill_tokens=512,
    decode_rows=4,
    hidden_size=256,
    dtype=torch.float32,
)


def small_decode(number: int) -> Frame:
    """Return a decode step within ``SMALL``; its hidden states are its number."""
    return Frame(
        kind=FrameKind.DECODE,
        micro_batch=number,
        rows=(Row(blocks=(1,), first=3, length=4),),
        hidden=torch.full((1, 1, 4), float(number)),
    )


def large_prefill(number: int, tokens: int = 512, rows: int = 4) -> Frame:
    """Return a prefill of equal prompts within ``LARGE``, with random hidden states."""
    generator = torch.Generator().manual_seed(number)
    return Frame(
        kind=FrameKind.PREFILL,
        micro_batch=number,
        rows=tuple(
            Row(blocks=slot_blocks(slot, 600, tokens), first=0, length=tokens)
            for slot in range(rows)
        ),
        hidden=torch.randn(1, rows * tokens, 256, generator=generator),
    )


def decode(number: int, rows: int = 2) -> Frame:
    return Frame(
        kind=FrameKind.DECODE,
        micro_batch=number,
        rows=tuple(Row(blocks=(slot,), first=3, length=4) for slot in range(rows)),
        hidden=torch.full((1, rows, 256), float(number)),
    )
