"""ALiBi: the linear bias of BLOOM's attention scores, in the library's own numbers.

Source: Press et al., "Train Short, Test Long" (2022); slopes as in transformers' BLOOM.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor


def alibi_slopes(heads: int) -> Tensor:
    """Slope of every head, ``[heads]`` float32."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = _geometric(power, torch.arange(1, 1 + power))
    if power == heads:
        return slopes
    # Heads beyond the power of two take every other slope of the next one.
    extra = _geometric(2 * power, torch.arange(1, 1 + 2 * (heads - power), 2))
    return torch.cat([slopes, extra])


def _geometric(heads: int, exponents: Tensor) -> Tensor:
    base = torch.full((), 2 ** (-(2 ** -(math.log2(heads) - 3))), dtype=torch.float32)
    return torch.pow(base, exponents.to(torch.int32))


@lru_cache(maxsize=64)
def _slopes_on(heads: int, device: torch.device) -> Tensor:
    return alibi_slopes(heads).to(device)


def alibi_bias(rows: int, heads: int, keys: int, like: Tensor) -> Tensor:
    """Bias of key position ``s``, ``[rows * heads, 1, keys]`` in the dtype of ``like``.

    It depends on the key alone: softmax ignores the constant that a query's position would add.
    """
    slopes = _slopes_on(heads, like.device)
    bias = slopes[:, None, None] * torch.arange(keys, device=like.device)  # [heads, 1, keys]
    return bias.repeat(rows, 1, 1).to(like.dtype)
