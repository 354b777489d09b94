"""GPTQ files: the four tensors of an operator, and the ``quantization_config`` of a model.

Format: ``qweight`` int32 ``[K b / 32, N]``, codes as one little-endian bit stream down every
column; ``qzeros`` int32 ``[G, N b / 32]``, zero points as one along every row, minus one in version
1; ``scales`` ``[G, N]``; ``g_idx`` int32 ``[K]``, the group of every input. Read as bytes, a
transposed ``qweight`` is exactly ``PackedWeight.codes``.

Shape legend: N output features, K input features, G groups, b bits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llmpq.errors import SpecError
from llmpq.kernels.base import PackedWeight, pack_codes, unpack_signed
from llmpq.quant.quantizers.integer import IntegerWeight
from llmpq.spec.precision import Precision

PARTS = ("qweight", "qzeros", "scales", "g_idx")
WORD_BITS = 32
_ONES = {4: 0x11111111, 8: 0x01010101}


def to_packed(
    parts: Mapping[str, Tensor],
    shape: tuple[int, int],
    precision: Precision,
    scale_dtype: torch.dtype,
    *,
    zero_offset: int,
) -> PackedWeight:
    """Turn the tensors of one operator into the form that kernels read.

    Args:
        parts: ``qweight``, ``qzeros``, ``scales`` and, where the file has it, ``g_idx``.
        shape: N and K.
        precision: bits and groups of the file; if it is symmetric and the zero points are not
            central, the result is asymmetric.
        scale_dtype: dtype of the run.
        zero_offset: subtracted from zero points in the file: 1 in version 1, 0 in version 2.

    Raises:
        SpecError: a tensor has a wrong shape or dtype, or groups have different sizes.
    """
    rows, columns = shape
    group = precision.effective_group(columns)
    _check(parts, shape, precision)
    codes = parts["qweight"].T.contiguous().view(torch.uint8)  # [N, K b / 8]
    order = _order_of(parts.get("g_idx"), columns, group)
    if order is not None:
        codes = pack_codes(_unpacked(codes, precision.bits, columns)[:, order], precision.bits)
    half = 1 << (precision.bits - 1)
    zero_points = _zero_points(parts["qzeros"], rows, precision, zero_offset)  # [G, N]
    if precision.symmetric and not bool((zero_points == half).all()):
        precision = Precision(
            bits=precision.bits, method=precision.method, group_size=precision.group_size
        )
    scales = parts["scales"].to(torch.float32)  # [G, N]
    zeros = None if precision.symmetric else (half - zero_points) * scales
    return PackedWeight(
        out_features=rows,
        in_features=columns,
        precision=precision,
        codes=codes,
        scales=_finite(scales, scale_dtype),
        zeros=None if zeros is None else _finite(zeros, scale_dtype),
        order=None if order is None else order.to(torch.int32),
    )


def from_integers(weight: IntegerWeight, *, zero_offset: int = 1) -> dict[str, Tensor]:
    """Turn a quantized matrix into the tensors of a file; the inverse of :func:`to_packed`.

    Raises:
        SpecError: its shape does not fill whole words, or a scale overflows float16.
    """
    bits, (rows, columns) = weight.precision.bits, weight.shape
    if rows * bits % WORD_BITS or columns * bits % WORD_BITS:
        raise SpecError(
            f"GPTQ file: found a weight [{rows}, {columns}] of {bits} bits, expected features that "
            f"fill words of {WORD_BITS} bits"
        )
    scales = weight.scales.T.to(torch.float16).contiguous()  # [G, N]
    if not bool(torch.isfinite(scales).all()):
        raise SpecError("GPTQ file: found a scale that does not fit float16")
    codes, groups = weight.codes, torch.arange(columns, dtype=torch.int32) // weight.group_size
    if weight.order is not None:
        order = weight.order.long()
        codes = torch.empty_like(codes).index_copy_(1, order, codes)
        groups = torch.empty_like(groups).index_copy_(0, order, groups)
    stored_zeros = (weight.zero_points - zero_offset).T & ((1 << bits) - 1)  # [G, N]
    # A single group may keep the stride of a column, which cannot be viewed as words.
    stored_zeros = stored_zeros.to(torch.uint8).flatten().view(stored_zeros.shape)
    return {
        "qweight": pack_codes(codes, bits).view(torch.int32).T.contiguous(),
        "qzeros": pack_codes(stored_zeros, bits).view(torch.int32),
        "scales": scales,
        "g_idx": groups,
    }


def concatenate_rows(parts: list[PackedWeight]) -> PackedWeight:
    """Concatenate weights with the same inputs along their outputs, such as gate and up.

    Raises:
        SpecError: they differ in precision, or in the order of their columns.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts[1:]:
        if first.order is None or part.order is None:
            is_same_order = first.order is part.order
        else:
            is_same_order = torch.equal(first.order, part.order)
        if part.precision != first.precision or not is_same_order:
            raise SpecError(
                f"GPTQ file: found {first.precision} and {part.precision}, or different orders of "
                "columns, in operators that run as one; expected the same"
            )
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return PackedWeight(
        out_features=sum(part.out_features for part in parts),
        in_features=first.in_features,
        precision=first.precision,
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=torch.cat(zeros) if zeros else None,
        order=first.order,
    )


def make_config(
    precisions: Sequence[Precision],
    layers_name: str,
    *,
    act_order: bool,
    meta: Mapping[str, Any],
    head: tuple[str, Precision] | None = None,
) -> dict[str, Any]:
    """Return the ``quantization_config`` of a model whose layers have these precisions.

    The most common quantized precision is the file's; the layers of every other one get a rule.
    Files of symmetric layers have version 1, others version 2: gptqmodel reads version 1 only if it
    is symmetric or made by gptqmodel.

    Args:
        precisions: of every layer; layers of 16 bits are not quantized.
        layers_name: what the list of layers is called, such as ``layers``.
        act_order: whether groups of inputs are looked up in ``g_idx``.
        meta: provenance of the file.
        head: name and precision of the LM head if it is quantized, too.

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
    others = [] if head is None else [head[1]]
    is_symmetric = all(precision.symmetric for precision in (*counts, *others))
    dynamic: dict[str, dict[str, Any]] = {}
    for precision, indices in layers.items():
        if precision == common:
            continue
        numbers = "|".join(map(str, indices))
        sign = "-" if precision.bits == 16 else "+"
        pattern = rf"{sign}:.*\.{re.escape(layers_name)}\.(?:{numbers})\..*"
        dynamic[pattern] = {} if precision.bits == 16 else _fields_of(precision)
    if head is not None and head[1] != common:
        dynamic[rf"+:{re.escape(head[0])}$"] = _fields_of(head[1])
    return _fields_of(common) | {
        "desc_act": act_order,
        "lm_head": head is not None,
        "quant_method": "gptq",
        "checkpoint_format": "gptq" if is_symmetric else "gptq_v2",
        "pack_dtype": "int32",
        "dynamic": dynamic,
        "meta": dict(meta),
    }


def _check(parts: Mapping[str, Tensor], shape: tuple[int, int], precision: Precision) -> None:
    rows, columns = shape
    bits, groups = precision.bits, columns // precision.effective_group(columns)
    expected: dict[str, tuple[int, ...]] = {
        "qweight": (columns * bits // WORD_BITS, rows),
        "qzeros": (groups, rows * bits // WORD_BITS),
        "scales": (groups, rows),
    }
    if parts.get("g_idx") is not None:
        expected["g_idx"] = (columns,)
    for name, wanted in expected.items():
        found = parts[name]
        is_kind = found.is_floating_point() if name == "scales" else found.dtype == torch.int32
        if tuple(found.shape) != wanted or not is_kind:
            raise SpecError(
                f"{name}: found {found.dtype} {list(found.shape)}, expected "
                f"{'numbers' if name == 'scales' else 'int32'} {list(wanted)} for a "
                f"{precision} weight {list(shape)}"
            )


def _order_of(groups: Tensor | None, columns: int, size: int) -> Tensor | None:
    """Return the order that makes groups contiguous; ``None`` if they are."""
    if groups is None:
        return None
    plain = torch.arange(columns, dtype=torch.int32) // size
    if torch.equal(groups, plain):
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], plain):
        raise SpecError(f"g_idx: expected {columns // size} groups of {size} inputs each")
    return order


def _zero_points(words: Tensor, count: int, precision: Precision, offset: int) -> Tensor:
    """Return the zero points of ``qzeros``, int32 ``[G, N]``."""
    bits = precision.bits
    if offset and bits in _ONES:
        # gptqmodel subtracts the ones from whole words, where a zero borrows from its neighbour:
        # adding to whole words restores the values.
        stored = _unpacked((words + _ONES[bits]).view(torch.uint8), bits, count)
        found = stored.to(torch.int32)
    else:
        stored = _unpacked(words.view(torch.uint8), bits, count)
        found = (stored.to(torch.int32) + offset) & ((1 << bits) - 1)
    half = 1 << (bits - 1)
    # Some symmetric files that say version 1 hold the zero points of version 2.
    is_other_version = offset == 1 and precision.symmetric and bool((found == half + 1).all())
    return found - 1 if is_other_version else found


def _unpacked(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the codes of rows of bytes, uint8 ``[rows, count]``."""
    signed = unpack_signed(packed.contiguous(), bits, count).to(torch.int16)
    return signed.add_(1 << (bits - 1)).to(torch.uint8)


def _finite(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``[G, N]`` as ``[N, G]`` in the run's dtype; raise if it overflows."""
    result = values.T.to(dtype).contiguous()
    if not bool(torch.isfinite(result).all()):
        raise SpecError(f"scales: found values that are not finite in {dtype}")
    return result


def _fields_of(precision: Precision) -> dict[str, Any]:
    group = -1 if precision.group_size is None else precision.group_size
    return {"bits": precision.bits, "group_size": group, "sym": precision.symmetric}
