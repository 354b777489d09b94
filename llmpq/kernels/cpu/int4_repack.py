"""From the stored form of 4-bit codes straight to torch's int4pack layout: a shuffle of nibbles.

torch's own packer wants one int32 a code, so that a weight grows eightfold on the way from one
4-bit form to the other. Where the layout is the one ``int4_layout`` knows, two codes change places
inside bytes instead, ten times faster; this module refuses any other layout.

Shape legend: N output features, K input features, B = K / 2 bytes of a packed row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmpq.kernels.cpu.int4_layout import BLOCK_ROWS

_HALF = BLOCK_ROWS // 2


def repack_int4(codes: Tensor) -> Tensor:
    """Return codes ``[N, B]``, packed in pairs along a row, in torch's AVX-512 layout ``[N, B]``.

    A block of 64 rows is stored input by input, 32 bytes each: row ``j`` in the low half of byte
    ``j``, row ``j + 32`` in its high half.

    Args:
        codes: uint8, as ``pack_codes`` makes them at 4 bits; N a multiple of 64, K even. The caller
            has asked ``int4_layout.layout_is_known``.
    """
    rows, row_bytes = codes.shape
    halves = codes.reshape(-1, 2, _HALF, row_bytes)  # [N/64, 2, 32, B]
    layout = torch.empty_like(codes)
    by_input = layout.view(-1, row_bytes, 2, _HALF)  # [N/64, B, parity of the input, 32]
    both = torch.empty((2, _HALF, row_bytes), dtype=torch.uint8)
    for block in range(rows // BLOCK_ROWS):
        low, high = halves[block]
        torch.bitwise_or(low & 0x0F, high << 4, out=both[0])
        torch.bitwise_or(low >> 4, high & 0xF0, out=both[1])
        by_input[block].copy_(both.permute(2, 0, 1))
    return layout
