"""compressed-tensors files: the tensors of an operator, and the ``quantization_config``.

Format ``pack-quantized``: ``weight_packed`` int32 ``[N, K b / 32]``, codes as one little-endian bit
stream along every row; ``weight_scale`` ``[N, G]``; ``weight_shape``; and, where codes are not
symmetric, ``weight_zero_point`` int32 ``[N b / 32, G]``, zero points as a stream down every column.
It holds 3 bits, which vLLM does not read in GPTQ's format.

Shape legend: N output features, K input features, G groups, b bits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llmpq.errors import SpecError
from llmpq.kernels.packed import pack_codes
from llmpq.quant.quantizers.integer import IntegerWeight
from llmpq.spec.precision import Precision

_WORD_BITS = 32
_ROUTERS = r"re:.*\.(gate|router|shared_expert_gate)$"


def compressed_parts(weight: IntegerWeight) -> dict[str, Tensor]:
    """Turn a quantized matrix into the tensors of a file.

    Raises:
        SpecError: its columns are reordered, or its shape does not fill whole words.
    """
    bits, (rows, columns) = weight.precision.bits, weight.shape
    if weight.order is not None:
        raise SpecError("compressed-tensors file: found reordered columns, expected none")
    if rows * bits % _WORD_BITS or columns * bits % _WORD_BITS:
        raise SpecError(
            f"compressed-tensors file: found a weight [{rows}, {columns}] of {bits} bits, expected "
            f"features that fill words of {_WORD_BITS} bits"
        )
    parts = {
        "weight_packed": pack_codes(weight.codes, bits).view(torch.int32),
        "weight_scale": weight.scales.to(torch.bfloat16),  # exact: scales have few bits
        "weight_shape": torch.tensor([rows, columns]),
    }
    if not weight.precision.symmetric:
        zeros = weight.zero_points.T.to(torch.uint8).contiguous()  # [G, N]
        parts["weight_zero_point"] = pack_codes(zeros, bits).view(torch.int32).T.contiguous()
    return parts


def compressed_config(
    precisions: Sequence[Precision],
    layers_name: str,
    meta: Mapping[str, Any],
    head: tuple[str, Precision] | None = None,
) -> dict[str, Any]:
    """Return the ``quantization_config`` of a model whose layers have these precisions.

    Every precision is a group of its own, with a pattern of its layers' names.

    Args:
        precisions: of every layer; layers of 16 bits are not quantized.
        layers_name: what the list of layers is called, such as ``layers``.
        meta: provenance of the file.
        head: name and precision of the LM head if it is quantized, too.

    Raises:
        SpecError: no layer is quantized.
    """
    layers: dict[Precision, list[int]] = {}
    for index, precision in enumerate(precisions):
        layers.setdefault(precision, []).append(index)
    plain = [index for one, found in layers.items() if one.bits == 16 for index in found]
    quantized = {one: found for one, found in layers.items() if one.bits != 16}
    if not quantized:
        raise SpecError(
            "compressed-tensors file: found only layers of 16 bits, expected some to be quantized"
        )
    targets = {one: [_pattern(layers_name, found)] for one, found in quantized.items()}
    if head is not None:
        targets.setdefault(head[1], []).append(head[0])
    groups = {
        f"group_{number}": {
            "targets": own,
            "weights": _weights(precision),
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized",
        }
        for number, (precision, own) in enumerate(targets.items())
    }
    left = [] if head is not None else ["lm_head"]
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [*left, _ROUTERS, *([_pattern(layers_name, plain)] if plain else [])],
        "kv_cache_scheme": None,
        "meta": dict(meta),
    }


def _pattern(layers_name: str, indices: Sequence[int]) -> str:
    numbers = "|".join(map(str, indices))
    return rf"re:.*\.{re.escape(layers_name)}\.({numbers})\..*"


def _weights(precision: Precision) -> dict[str, Any]:
    is_grouped = precision.group_size is not None
    return {
        "num_bits": precision.bits,
        "type": "int",
        "symmetric": precision.symmetric,
        "strategy": "group" if is_grouped else "channel",
        "group_size": precision.group_size,
        "dynamic": False,
    }
