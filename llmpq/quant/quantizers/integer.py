"""Integer weights: codes with integer zero points, the grid of GPTQ files.

``weight = (code - zero_point) * scale``. Zero is always a point of the grid, as the format needs;
scales are exact in float16, bfloat16 and float32, so every reader gets the same weights.

Shape legend: N output features, K input features, G groups of a row, b bits, C columns of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.errors import SpecError
from llmpq.kernels.base import PackedWeight, pack_codes
from llmpq.spec.precision import Precision

# Fractions of the full range that the search tries; smaller ones clip outliers.
_SHARES = tuple(1.0 - 0.025 * step for step in range(21))
_SMALLEST_SCALE = 2.0**-17  # below, float16 keeps fewer of a number's bits than bfloat16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IntegerWeight:
    """A weight matrix ``[N, K]`` as a GPTQ file stores it, before its bits are packed.

    Attributes:
        precision: bits, groups, symmetry and method.
        codes: uint8 ``[N, K]``, columns in stored order.
        scales: float32 ``[N, G]``, positive.
        zero_points: int32 ``[N, G]``: the code of zero; ``2^(b-1)`` everywhere when symmetric.
        order: int32 ``[K]``, the input feature of every stored column, or ``None``.
    """

    precision: Precision
    codes: Tensor
    scales: Tensor
    zero_points: Tensor
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Output and input features."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def group_size(self) -> int:
        """Columns that share one scale."""
        return self.shape[1] // self.scales.shape[1]

    def rows(self, rows: slice) -> IntegerWeight:
        """Return some of the output features; the tensors are views."""
        return IntegerWeight(
            precision=self.precision,
            codes=self.codes[rows],
            scales=self.scales[rows],
            zero_points=self.zero_points[rows],
            order=self.order,
        )

    @staticmethod
    def stacked(parts: Sequence[IntegerWeight]) -> IntegerWeight:
        """Return parts with the same inputs, stacked along their outputs."""
        return IntegerWeight(
            precision=parts[0].precision,
            codes=torch.cat([part.codes for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
            zero_points=torch.cat([part.zero_points for part in parts]),
            order=parts[0].order,
        )

    def dequantize(self) -> Tensor:
        """Return the weight, columns in the model's own order: float32 ``[N, K]``."""
        scales = self.scales.repeat_interleave(self.group_size, 1)
        zero_points = self.zero_points.repeat_interleave(self.group_size, 1)
        stored = (self.codes.to(torch.int32) - zero_points) * scales
        if self.order is None:
            return stored
        return torch.empty_like(stored).index_copy_(1, self.order.long(), stored)

    def packed(self, scale_dtype: torch.dtype) -> PackedWeight:
        """Return the packed form that kernels read.

        Raises:
            SpecError: a scale overflows ``scale_dtype``.
        """
        half = 1 << (self.precision.bits - 1)
        scales = self.scales.to(scale_dtype)
        if not bool(torch.isfinite(scales).all()):
            raise SpecError(f"weight: found scales that overflow {scale_dtype}")
        zeros = None
        if not self.precision.symmetric:
            zeros = ((half - self.zero_points) * self.scales).to(scale_dtype)
        return PackedWeight(
            out_features=self.shape[0],
            in_features=self.shape[1],
            precision=self.precision,
            codes=pack_codes(self.codes, self.precision.bits),
            scales=scales,
            zeros=zeros,
            order=self.order,
        )


def fit_integer_grid(
    columns: Tensor, precision: Precision, importance: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Choose scale and zero point of every row's group of columns.

    Args:
        columns: float32 ``[C, N]``: weights of one group, an input feature in every row.
        precision: bits and symmetry.
        importance: ``[C]``, the weight of each column's squared error; the grid with the smallest
            weighted error is chosen among fractions of the full range. ``None``: the full range.

    Returns:
        Scale, float32 ``[N]``, and zero point, float32 ``[N]`` of whole numbers.

    Raises:
        SpecError: a weight is not finite.
    """
    low, high = columns.amin(0).clamp_max(0), columns.amax(0).clamp_min(0)  # [N]
    if not bool(torch.isfinite(low).all() and torch.isfinite(high).all()):
        raise SpecError("weight: found values that are not finite, expected only finite ones")
    scale, zero_point = _grid(low, high, precision)
    if importance is None:
        return scale, zero_point
    least: Tensor | None = None
    for share in _SHARES:
        tried = _grid(low * share, high * share, precision)
        error = snap(columns, *tried, precision.bits).sub_(columns)
        cost = importance @ error.square_()  # [N]
        if least is not None:
            is_better = cost < least
            scale = torch.where(is_better, tried[0], scale)
            zero_point = torch.where(is_better, tried[1], zero_point)
        least = cost if least is None else torch.minimum(least, cost)
    return scale, zero_point


def integer_codes(columns: Tensor, scale: Tensor, zero_point: Tensor, bits: int) -> Tensor:
    """Return the nearest codes of ``columns`` ``[..., N]`` as whole float32 numbers."""
    return (columns / scale).round_().add_(zero_point).clamp_(0, (1 << bits) - 1)


def snap(columns: Tensor, scale: Tensor, zero_point: Tensor, bits: int) -> Tensor:
    """Return the nearest points of the grid to ``columns`` ``[..., N]``."""
    return integer_codes(columns, scale, zero_point, bits).sub_(zero_point).mul_(scale)


def _grid(low: Tensor, high: Tensor, precision: Precision) -> tuple[Tensor, Tensor]:
    """Scale and zero point of ranges ``[low, high]`` around zero."""
    bits = precision.bits
    half, steps = 1 << (bits - 1), (1 << bits) - 1
    if precision.symmetric:
        # 8 bits: symmetric codes. Fewer bits: also the one code without a negative.
        width = 127.0 if bits == 8 else steps / 2
        scale = _portable(torch.maximum(high, -low) / width)
        return scale, torch.full_like(scale, half)
    scale = _portable(high / steps - low / steps)
    # Files store zero points minus one in b bits, and not every reader wraps around: never 0.
    return scale, (-low / scale).round_().clamp_(1, steps)


def _portable(scale: Tensor) -> Tensor:
    """Round to numbers that are exact in float16, bfloat16 and float32; never to zero."""
    return scale.clamp(min=_SMALLEST_SCALE, max=65280.0).to(torch.bfloat16).to(torch.float32)
