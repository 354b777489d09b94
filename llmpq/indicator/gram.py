"""The sum of ``x x^T`` over an operator's inputs, its upper half alone: it is symmetric.

Half the memory and half the work of the whole matrix, which no power iteration needs. Rows are cut
into panels; a panel holds its columns from the diagonal on.

Shape legend: K input features, P rows of a panel, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

PANEL_ROWS = 256
"""Rows of a panel: enough for a matrix product to be fast, and few against K, for the square on the
diagonal is held whole."""


class UpperGram:
    """``sum x x^T`` as something to multiply vectors by.

    Args:
        in_features: K.
        device: of the inputs.

    Attributes:
        tokens: inputs seen.
        panels: float32, ``[P, K - first row]`` each.
    """

    dtype = torch.float32

    def __init__(self, in_features: int, device: torch.device | str = "cpu") -> None:
        self.tokens = 0
        self.device = torch.device(device)
        self.panels = [
            torch.zeros(min(PANEL_ROWS, in_features - first), in_features - first, device=device)
            for first in range(0, in_features, PANEL_ROWS)
        ]

    def __len__(self) -> int:
        return self.panels[0].shape[1]

    def add(self, inputs: Tensor) -> None:
        """Take in ``[T, K]`` more inputs."""
        inputs = inputs.to(self.dtype)
        self.tokens += inputs.shape[0]
        for first, panel in zip(range(0, len(self), PANEL_ROWS), self.panels, strict=True):
            rest = inputs[:, first:]
            panel.addmm_(rest[:, : len(panel)].T, rest)

    def __matmul__(self, vector: Tensor) -> Tensor:
        """Multiply by ``[K]``: what is above the diagonal counts below it too."""
        image = torch.zeros_like(vector)
        for first, panel in zip(range(0, len(self), PANEL_ROWS), self.panels, strict=True):
            rows = len(panel)
            image[first : first + rows] += panel @ vector[first:]
            image[first + rows :] += panel[:, rows:].T @ vector[first : first + rows]
        return image

    @staticmethod
    def bytes_for(in_features: int) -> int:
        """Return the bytes of the panels."""
        firsts = range(0, in_features, PANEL_ROWS)
        return 4 * sum(
            min(PANEL_ROWS, in_features - first) * (in_features - first) for first in firsts
        )
