"""The hand-over of hidden states between stages that compute in different number formats.

A state travels in the format of its sender and is rounded once, on arrival (see
``llmpq.spec.devices.formats`` for what is exact).

Shapes: N tokens of a step, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmpq.errors import StageError


def received(hidden: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """Return hidden states ``[..., H]`` on ``device``, rounded to ``dtype`` (``None``: as sent).

    Raises:
        StageError: a finite number of them is larger than the format's largest.
    """
    if dtype is None or hidden.dtype == dtype:
        return hidden.to(device)
    found = hidden.to(dtype)
    if bool((found.isinf() & hidden.isfinite()).any()):
        largest = hidden.abs().masked_fill(hidden.isinf(), 0).max().item()
        name = str(dtype).removeprefix("torch.")
        raise StageError(
            f"hidden states of another stage: found up to {largest:.3g} in {hidden.dtype}, "
            f"expected at most {torch.finfo(dtype).max:.3g}, the largest {name}; give this device "
            "another format in the cluster file ('dtype': 'float32') or leave it out"
        )
    return found.to(device)
