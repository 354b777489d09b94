"""Root mean square norm in one pass over the rows, where torch needs seven: compiled, on a CPU."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from llmpq.kernels.cpu.native import TYPES, Norm, library

_LANES = 16


def can_norm(weight: Tensor) -> bool:
    """Return whether rows of ``weight``'s length, type and place can be normed here."""
    fits = weight.dim() == 1 and weight.numel() % _LANES == 0 and weight.dtype in TYPES
    return fits and weight.device.type == "cpu" and library() is not None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return ``weight * (x / sqrt(mean(x^2) + epsilon))`` of each row ``[..., K]``, in x's dtype.

    ``x`` has the dtype of ``weight``; the mean is float32, and the row is rounded to its dtype
    before the weight multiplies it, as in transformers' Llama.
    """
    x = x.contiguous()
    y = torch.empty_like(x)
    columns = weight.numel()
    call = Norm(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        y=y.data_ptr(),
        rows=x.numel() // columns,
        columns=columns,
        epsilon=epsilon,
        type=TYPES[x.dtype],
        weight_type=TYPES[weight.dtype],
        rounds=True,
        threads=torch.get_num_threads(),
    )
    loaded = library()
    assert loaded is not None
    loaded.kernels_norm(byref(call))
    return y
