"""Bounds of rounding errors that follow from sizes and number formats, for any processor."""

import torch
from torch import Tensor

SPREAD = 4.0
"""Rounding errors of random sign add up to their root: a sum of ``n`` terms is further than ``4
sqrt(n)`` roundings from its value once in 1,500 times at most (Higham and Mary, 2019)."""


def unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def gamma(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """Relative error of a sum of so many terms, in any order of adding them up."""
    error = SPREAD * terms**0.5 * unit_roundoff(dtype)
    return error / (1 - error)


def attention_error(
    query: Tensor, keys: Tensor, values: Tensor, weights: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the error that float32 sums allow in attention, rounded to ``dtype`` at the end.

    Args:
        query: times the scaling, ``[H, d]`` in float64.
        keys: of each head of queries, ``[H, T, d]``.
        values: likewise.
        weights: the softmax's result, ``[H, T]``.
        dtype: that queries, keys and values were given in; 16-bit kernels round weights to it.
    """
    u, (tokens, dim) = unit_roundoff(torch.float32), keys.shape[1:]
    # The terms of a score are of random sign, so its partial sums grow as their norm does.
    of_score = gamma(dim) * (query[:, None] * keys).norm(dim=-1)  # [H, T]
    # Scaling, subtracting the largest score, and an exponential good to two units each.
    of_score = of_score + 8 * u * (1 + (query[:, None] * keys).sum(-1).abs())
    # A weight is a quotient: its own score's error and, at most, the largest one.
    relative = of_score + of_score.max(dim=1, keepdim=True).values + 2 * gamma(tokens)
    if dtype != torch.float32:
        relative = relative + 2 * unit_roundoff(dtype)
    error = torch.einsum("ht,htd->hd", relative * weights, values.abs())
    exact = torch.einsum("ht,htd->hd", weights, values)
    return error + unit_roundoff(dtype) * exact.abs()
