"""Keep stored codes that mean what the plan's bits mean, instead of rounding them again.

AWQ and compressed-tensors store 3 and 4 bits in groups and 8 bits with one scale an output. Where
bits and groups are those of the plan, the codes become a ``PackedWeight`` of the same size as a
rounded one; symmetric codes of 3 and 4 bits get zeros of 0.

Shape legend: N output features, K input features, G groups, b bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmpq.kernels.packed import PackedWeight, pack_codes
from llmpq.models.files.decoded import DecodedSource, Encoded, Read
from llmpq.models.files.scaled import Awq, Scaled, unpack_awq, unpack_words
from llmpq.models.files.sources import TensorSource
from llmpq.quant.checkpoint.format import concatenate_rows
from llmpq.spec.precision import Precision


def is_as_stored(source: TensorSource, precision: Precision) -> bool:
    """Return whether a matrix is stored in the bits and groups of a precision."""
    if not isinstance(source, DecodedSource) or precision.bits == 16:
        return False
    return all(_fits(part, precision) for part in source.parts)


def read_as_stored(
    source: TensorSource, precision: Precision, dtype: torch.dtype, read: Read
) -> PackedWeight | None:
    """Read a matrix for which :func:`is_as_stored` is true.

    Args:
        source: of the matrix, in one part or several along its outputs.
        precision: of the plan.
        dtype: of the run, to which scales and zeros are rounded.
        read: reads stored tensors.

    Returns:
        ``None`` if a scale is not finite and positive in ``dtype``.
    """
    assert isinstance(source, DecodedSource)
    parts = []
    for part in source.parts:
        codes, scales, zero_points = _integers(part, precision, read)
        half = 1 << (precision.bits - 1)
        zeros = None if precision.symmetric else ((half - zero_points) * scales).to(dtype)
        rounded = scales.to(dtype)
        is_valid = torch.isfinite(rounded).all() and (rounded > 0).all()
        if not is_valid or (zeros is not None and not torch.isfinite(zeros).all()):
            return None
        parts.append(
            PackedWeight(
                out_features=codes.shape[0],
                in_features=codes.shape[1],
                precision=precision,
                codes=pack_codes(codes, precision.bits),
                scales=rounded.contiguous(),
                zeros=None if zeros is None else zeros.contiguous(),
            )
        )
    return concatenate_rows(parts)


def _fits(part: Encoded, precision: Precision) -> bool:
    columns = part.shape[1]
    group = precision.effective_group(columns)
    if isinstance(part, Awq):
        groups = part.scales.shape[0]
        return precision.bits == 4 and not precision.symmetric and columns == groups * group
    if not isinstance(part, Scaled) or part.groups is not None or part.block != (1, group):
        return False
    is_symmetric = part.zeros is None
    bits = 8 if part.codes.dtype == torch.int8 else part.bits
    return bits == precision.bits and (is_symmetric or not precision.symmetric)


def _integers(part: Encoded, precision: Precision, read: Read) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes uint8 ``[N, K]``, scales float32 and zero points int32 ``[N, G]``."""
    half = 1 << (precision.bits - 1)
    if isinstance(part, Awq):
        codes = unpack_awq(read(part.codes)).T.contiguous()
        zero_points = unpack_awq(read(part.zeros)).T.to(torch.int32)
        return codes, read(part.scales).T.to(torch.float32), zero_points
    assert isinstance(part, Scaled)
    rows, columns = part.shape
    stored = read(part.codes)
    if part.bits is None:
        codes = stored.view(torch.uint8).bitwise_xor(0x80)  # adds 128
    else:
        codes = unpack_words(stored, part.bits, columns)
    scales = read(part.scales).to(torch.float32).view(rows, -1)
    if part.zeros is None:
        return codes, scales, torch.full(scales.shape, half, dtype=torch.int32)
    found = read(part.zeros)
    if found.dtype == torch.int32:
        zero_points = unpack_words(found.T.contiguous(), precision.bits, rows).T.to(torch.int32)
    else:
        zero_points = found.view(rows, -1).to(torch.int32) + half
    return codes, scales, zero_points
