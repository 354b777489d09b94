"""Weights of 16 bits on a CPU: bf16 that oneDNN has put in its own order once.

A plain ``F.linear`` reorders the weight at every call, which is half of the time of one row. This
module refuses everything that would pad the weight or leave oneDNN's fast products.

Shape legend: N output features, K input features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmpq.kernels.native import has_bf16_products

DENSE_BACKEND = "cpu_bf16"
"""Name of this way to multiply, next to the names in ``registry.BACKENDS``."""

_MULTIPLE = 64  # oneDNN pads blocks of outputs to it, and then a weight weighs more than 2 N K


def can_prepack(device_type: str, dtype: torch.dtype, out_features: int, in_features: int) -> bool:
    """Return whether a weight ``[N, K]`` is faster prepacked here, and weighs the same."""
    whole = out_features % _MULTIPLE == 0 and in_features % _MULTIPLE == 0
    return device_type == "cpu" and dtype == torch.bfloat16 and whole and has_bf16_products()


def prepack(weight: Tensor) -> Tensor:
    """Return bf16 ``[N, K]`` in oneDNN's order: opaque, and read by ``prepacked_linear`` alone."""
    layout: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
    return layout


def prepacked_linear(x: Tensor, layout: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x @ weight.T + bias`` for bf16 ``x`` ``[..., K]``: bf16 ``[..., N]``."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, layout, bias, "none", [], "")
    return y
