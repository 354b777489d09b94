"""Step size and rounding error of a weight matrix, one block of rows at a time.

Shape legend: N output features, K input features, G groups of a row, R rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmpq.kernels.base import exact_dtype, row_blocks
from llmpq.quant.quantizers.rtn import fit_grid, nearest_codes
from llmpq.spec.precision import Precision, default_precision


def mean_squared_step(weight: Tensor, bits: int) -> float:
    """Return the mean over all groups of the squared step ``S_W(b)^2`` of the default quantizer.

    ``S`` is ``(max - min) / (2^b - 1)`` for min-max, ``max|w| / (2^(b-1) - 1)`` for symmetric grids
    (LLM-PQ, Theorem 1). The paper has one scale per matrix, ours one per group or channel.

    Args:
        weight: ``[N, K]``.
        bits: 3, 4 or 8.
    """
    precision = default_precision(bits)
    total, count = 0.0, 0
    for grouped in _grouped_blocks(weight, precision):  # [R, G, K/G]
        low, high = grouped.amin(dim=-1), grouped.amax(dim=-1)
        if precision.symmetric:
            step = torch.maximum(high, -low) / (2 ** (bits - 1) - 1)
        else:
            step = (high - low) / (2**bits - 1)
        total += float(step.square().sum(dtype=exact_dtype(step.device)))
        count += step.numel()
    return total / max(1, count)


def squared_error(weight: Tensor, bits: int, scale_dtype: torch.dtype) -> float:
    """Return ``||Q(W) - W||^2`` of the default quantizer.

    Args:
        weight: ``[N, K]``.
        bits: 3, 4 or 8.
        scale_dtype: dtype of scales and zeros, that of the run.
    """
    precision = default_precision(bits)
    total = 0.0
    for grouped in _grouped_blocks(weight, precision):  # [R, G, K/G]
        scale, zero = fit_grid(grouped, precision, scale_dtype)
        restored = nearest_codes(grouped, scale, zero, bits).float().sub_(1 << (bits - 1))
        restored.mul_(scale.unsqueeze(-1)).add_(zero.unsqueeze(-1))
        total += float(restored.sub_(grouped).square_().sum(dtype=exact_dtype(weight.device)))
    return total


def _grouped_blocks(weight: Tensor, precision: Precision) -> Iterator[Tensor]:
    rows, columns = weight.shape
    group = precision.effective_group(columns)
    for block in row_blocks(rows, columns):
        yield weight[block].to(torch.float32).reshape(-1, columns // group, group)
