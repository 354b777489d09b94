"""The ``quantization_config`` of our GPTQ files; ``spec.huggingface.gptq`` reads it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from llmpq.errors import SpecError
from llmpq.spec.precision import Precision


def make_config(
    precisions: Sequence[Precision], layers_name: str, *, act_order: bool, meta: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the ``quantization_config`` of a model whose layers have these precisions.

    The commonest quantized precision is the file's own; the layers of every other get one rule.
    Symmetric files are of version 1, which every reader knows. With an asymmetric layer it is
    version 2: gptqmodel reads version 1 only when symmetric or of its own making.

    Args:
        precisions: of every layer; 16 bits leaves a layer as it is.
        layers_name: what the list of layers is called, such as ``layers``.
        act_order: whether groups of inputs are found through ``g_idx``.
        meta: where the file comes from.

    Raises:
        SpecError: no layer is quantized.
    """
    layers: dict[Precision, list[int]] = {}
    for index, precision in enumerate(precisions):
        layers.setdefault(precision, []).append(index)
    counts = Counter(precision for precision in precisions if precision.bits != 16)
    if not counts:
        raise SpecError("GPTQ file: found only layers of 16 bits, expected some to be quantized")
    common = counts.most_common(1)[0][0]
    is_symmetric = all(precision.symmetric for precision in counts)
    dynamic: dict[str, dict[str, Any]] = {}
    for precision, indices in layers.items():
        if precision == common:
            continue
        numbers = "|".join(map(str, indices))
        sign = "-" if precision.bits == 16 else "+"
        pattern = rf"{sign}:.*\.{re.escape(layers_name)}\.(?:{numbers})\..*"
        dynamic[pattern] = {} if precision.bits == 16 else _fields_of(precision)
    return _fields_of(common) | {
        "desc_act": act_order,
        "lm_head": False,
        "quant_method": "gptq",
        "checkpoint_format": "gptq" if is_symmetric else "gptq_v2",
        "pack_dtype": "int32",
        "dynamic": dynamic,
        "meta": dict(meta),
    }


def _fields_of(precision: Precision) -> dict[str, Any]:
    group = -1 if precision.group_size is None else precision.group_size
    return {"bits": precision.bits, "group_size": group, "sym": precision.symmetric}
