"""Statistics of an operator's inputs: their moments, or GPTQ's Hessian.

Both are updated batch by batch and keep no activations. Vectors are summed in float64; the matrix
stays float32, because it is as large as a weight.

Shape legend: K input features, T tokens.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from llmpq.kernels.base import exact_dtype


class Collector(Protocol):
    """Collects statistics of the inputs of one operator."""

    def add(self, inputs: Tensor) -> None:
        """Add inputs ``[T, K]``, read only."""
        ...


class Moments:
    """First and second moments of all entries of an operator's inputs.

    Args:
        in_features: K.
        device: of the inputs.

    Attributes:
        tokens: number of inputs.
    """

    def __init__(self, in_features: int, device: torch.device | str = "cpu") -> None:
        self.tokens = 0
        self._sum = torch.zeros(in_features, dtype=exact_dtype(torch.device(device)), device=device)
        self._squares = torch.zeros_like(self._sum)

    def add(self, inputs: Tensor) -> None:
        """Add inputs ``[T, K]``."""
        self.tokens += inputs.shape[0]
        self._sum += inputs.sum(0, dtype=self._sum.dtype)
        self._squares += inputs.float().square().sum(0, dtype=self._sum.dtype)

    @property
    def mean(self) -> float:
        """Mean of all entries of the inputs; zero before any input."""
        return float(self._sum.mean()) / max(1, self.tokens)

    @property
    def second_moment(self) -> float:
        """Mean square of all entries."""
        return float(self._squares.mean()) / max(1, self.tokens)

    @property
    def variance(self) -> float:
        """Variance of all entries taken together."""
        return max(0.0, self.second_moment - self.mean**2)


class Hessian:
    """The sum of ``x x^T`` over an operator's inputs: half the Hessian of its squared output error.

    Source: Frantar et al., "GPTQ" (2023), Eq. 2, where it is ``2 X X^T``; the factor does not
    change GPTQ's result.

    Args:
        in_features: K.
        device: of the inputs.

    Attributes:
        tokens: number of inputs.
        matrix: float32 ``[K, K]``, symmetric.
    """

    def __init__(self, in_features: int, device: torch.device | str = "cpu") -> None:
        self.tokens = 0
        self.matrix = torch.zeros(in_features, in_features, dtype=torch.float32, device=device)

    def add(self, inputs: Tensor) -> None:
        """Add inputs ``[T, K]``."""
        inputs = inputs.to(torch.float32)
        self.tokens += inputs.shape[0]
        self.matrix.addmm_(inputs.T, inputs)
