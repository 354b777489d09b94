"""The quantizers that need only the weight, by name, and the function that calls them.

A quantizer that needs a Hessian or activations has its own entry point (``quantizers.gptq``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llmpq.errors import SpecError
from llmpq.kernels.packed import PackedWeight
from llmpq.quant.quantizers.rtn import round_to_nearest
from llmpq.spec.precision import Precision

Quantizer = Callable[[Tensor, Precision, torch.dtype], PackedWeight]

METHODS: dict[str, Quantizer] = {"rtn": round_to_nearest}
"""Ways to choose the integers of a weight from the weight alone, by ``Precision.method``."""


def quantize(weight: Tensor, precision: Precision, scale_dtype: torch.dtype) -> PackedWeight:
    """Quantize one weight matrix ``[out_features, in_features]``.

    Args:
        weight: any floating dtype; read only.
        precision: 3, 4 or 8 bits, with a method of ``METHODS``.
        scale_dtype: dtype of the run, in which scales and zeros are stored.

    Raises:
        SpecError: unknown method (16 bits has none), or a weight that cannot be represented.
    """
    if precision.method not in METHODS:
        raise SpecError(
            f"quantize: found precision {precision}, expected a method of {sorted(METHODS)}"
        )
    return METHODS[precision.method](weight, precision, scale_dtype)
