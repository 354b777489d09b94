"""The order in which the Triton kernels read 3- and 4-bit codes; see ``triton_kernels``.

Shape legend: R rows, K input features, S segments of a row, J = K / S, b bits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def segments(bits: int) -> int:
    """Return S, the codes that share a byte's place: K must be a multiple of it."""
    return 2 if bits == 4 else 8


def plane_bytes(in_features: int, bits: int) -> int:
    """Return the bytes of a row in all planes: ``K b / 8``, as packed."""
    return in_features * bits // 8


def to_planes(codes: Tensor, bits: int) -> Tensor:
    """Order signed codes ``[R, K]``, int8, into planes ``[R, K b / 8]``, uint8."""
    unsigned = codes.add(1 << (bits - 1)).view(torch.uint8)
    parts = unsigned.view(codes.shape[0], segments(bits), -1).unbind(1)  # S of [R, J]
    if bits == 4:
        return parts[0] | (parts[1] << 4)
    low, middle, high = (torch.zeros_like(parts[0]) for _ in range(3))
    for s in range(4):
        low |= (parts[s] & 3) << (2 * s)
        middle |= (parts[s + 4] & 3) << (2 * s)
    for s in range(8):
        high |= (parts[s] >> 2) << s
    return torch.cat((low, middle, high), dim=1)
