"""Activations that are formulas of tensor operations, applied to a block of rows at a time.

BLOOM's and Phi's take five tensors as wide as the feed-forward. In blocks those of a block are all
that is added, and stay in a core's cache; every number is the one that the whole would give.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llmpq.spec.runtime_constants import ACTIVATION_BLOCK_VALUES


class InBlocks(nn.Module):
    """An elementwise activation that overwrites its input, which is not needed afterwards.

    Args:
        activation: the library's.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, values: Tensor) -> Tensor:
        """Return ``[..., features]``."""
        features = values.shape[-1]
        rows = max(1, ACTIVATION_BLOCK_VALUES // features)
        if values.numel() <= rows * features or values.device.type != "cpu":
            result: Tensor = self.activation(values)
            return result
        for block in torch.split(values.view(-1, features), rows):
            block.copy_(self.activation(block))
        return values


def install_blocks(layer: nn.Module, name: str) -> None:
    """Apply the activation ``name`` of ``layer``, such as ``mlp.gelu_impl``, in blocks."""
    path, _, last = name.rpartition(".")
    owner = layer.get_submodule(path)
    activation = owner.get_submodule(last)
    if not isinstance(activation, InBlocks):
        setattr(owner, last, InBlocks(activation))
