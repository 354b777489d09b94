"""torch's int4pack layout, read back: what calls with many rows need.

The layout is torch's own business and differs between instruction sets. The one known here is
that of AVX-512: every 64 rows of the weight are stored input by input, 32 bytes each, row ``j`` in
the low half of byte ``j`` and row ``j + 32`` in the high half. ``layout_is_known`` asks the torch
at hand whether that is so, and this module refuses to guess where it is not.

Shape legend: N output features, K input features, G groups of a row.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

BLOCK_ROWS = 64


def dequantize_int4pack_into(layout: Tensor, affine: Tensor, group_size: int, out: Tensor) -> None:
    """Write the weight into ``out``, rounded once from float32.

    Args:
        layout: codes as torch packed them, ``[N, K/2]`` uint8; N a multiple of ``BLOCK_ROWS``.
        affine: scale and zero, ``[G, N, 2]``.
        group_size: inputs that share a scale.
        out: ``[N, K]`` of any floating dtype.
    """
    rows, columns = out.shape
    block = torch.empty(BLOCK_ROWS, columns, dtype=torch.float32)
    grouped = block.view(BLOCK_ROWS, -1, group_size)  # [64, G, K/G]
    for start in range(0, rows, BLOCK_ROWS):
        here = slice(start, start + BLOCK_ROWS)
        _unpack_block(layout[here], block)
        scale, zero = affine[:, here].to(torch.float32).permute(2, 1, 0).unsqueeze(-1)  # [64, G, 1]
        grouped.mul_(scale).add_(zero)
        out[here].copy_(block)


@lru_cache(maxsize=1)
def layout_is_known() -> bool:
    """Return whether this torch, on this CPU, packs as this module reads."""
    codes = torch.arange(BLOCK_ROWS * 32).mul_(7).remainder_(13).view(BLOCK_ROWS, 32)
    layout = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    block = torch.empty(BLOCK_ROWS, 32)
    _unpack_block(layout, block)
    return torch.equal(block, codes.to(torch.float32) - 8)


def _unpack_block(layout: Tensor, block: Tensor) -> None:
    """Write ``code - 8`` of 64 rows ``[64, K/2]`` into ``block`` ``[64, K]``."""
    half = BLOCK_ROWS // 2
    pairs = layout.reshape(-1, half).t().contiguous()  # [32, K]
    block[:half].copy_(pairs & 0x0F)
    block[half:].copy_(pairs >> 4)
    block.sub_(8)
