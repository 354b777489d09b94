"""Quantization of weights, of modules and of whole decoder layers.

``quantize`` turns one matrix into a ``PackedWeight``; ``quantize_layer_`` quantizes a decoder layer
in place; ``llmpq.quant.loading.loader``, which imports transformers, loads a checkpoint.
"""

from llmpq.quant.modules.layer import (
    DenseLinear,
    QuantExperts,
    QuantLinear,
    quantize_layer_,
    stored_bytes,
)
from llmpq.quant.quantizers.rtn import quantize

__all__ = [
    "DenseLinear",
    "QuantExperts",
    "QuantLinear",
    "quantize",
    "quantize_layer_",
    "stored_bytes",
]
