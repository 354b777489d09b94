"""torch's int4pack layout on AVX-512: written from packed codes, and read back.

torch does not document the layout, and it differs between instruction sets. On AVX-512 every 64
rows
of the weight are stored input by input, 32 bytes each: row ``j`` in the low half of byte ``j``, row
``j + 32`` in the high half. ``layout_is_known`` checks that the installed torch does so.

Shape legend: N output features, K input features, G groups of a row, B = K / 2 bytes of a packed
row.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

BLOCK_ROWS = 64
_HALF = BLOCK_ROWS // 2


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
    """Return whether torch, on this CPU, packs in the layout of this module."""
    codes = torch.arange(BLOCK_ROWS * 32).mul_(7).remainder_(13).view(BLOCK_ROWS, 32)
    layout = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    block = torch.empty(BLOCK_ROWS, 32)
    _unpack_block(layout, block)
    return torch.equal(block, codes.to(torch.float32) - 8)


def _unpack_block(layout: Tensor, block: Tensor) -> None:
    """Write ``code - 8`` of 64 rows ``[64, K/2]`` into ``block`` ``[64, K]``."""
    pairs = layout.reshape(-1, _HALF).t().contiguous()  # [32, K]
    block[:_HALF].copy_(pairs & 0x0F)
    block[_HALF:].copy_(pairs >> 4)
    block.sub_(8)


def repack_int4(codes: Tensor) -> Tensor:
    """Return codes ``[N, B]``, packed in pairs along a row, in torch's AVX-512 layout ``[N, B]``.

    Needs no int32 copy of the codes, as opposed to torch's own packer, and is ten times faster.

    Args:
        codes: uint8, as ``pack_codes`` makes them at 4 bits; N a multiple of 64, K even;
            ``layout_is_known`` must hold.
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
