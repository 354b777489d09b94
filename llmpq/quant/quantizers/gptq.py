"""GPTQ: round one column after another and correct the later columns for each error.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers" (2023), Algorithm 1, with damping, act-order and lazy batches. Deviations: the factor
of the inverse comes from one Cholesky decomposition of the reversed matrix instead of an inverse
and a second one; a row with a smaller error after plain rounding keeps plain rounding; inputs that
never occurred are only rounded. All arithmetic is float32. The caller supplies the sum of
``x x^T``.

Shape legend: N output features, K input features, G groups of a row, B columns of a lazy batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from llmpq.errors import SpecError
from llmpq.quant.quantizers.integer import IntegerWeight, fit_integer_grid, integer_codes
from llmpq.spec.precision import Precision

Order = Literal["none", "static", "full"]
"""The order in which columns are rounded: as stored; by importance, with groups as stored; or by
importance, with groups in that order, which readers must look up (``g_idx``)."""

_BATCH = 128
_MAX_DAMPING = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqOptions:
    """Damping, order of columns and clipping of GPTQ.

    Attributes:
        damping: added to the diagonal, as a fraction of its mean.
        order: in which order columns are rounded.
        search: whether grids may clip outliers if that lowers the weighted error.
    """

    damping: float = 0.01
    order: Order = "none"
    search: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.damping <= _MAX_DAMPING:
            raise SpecError(f"gptq: found damping {self.damping}, expected it in (0, 1]")


def gptq(
    weight: Tensor, matrix: Tensor, precision: Precision, options: GptqOptions | None = None
) -> IntegerWeight:
    """Quantize ``weight`` so that the outputs on the calibration inputs change little.

    Operators that read the same inputs may be stacked along N: rows are independent.

    Args:
        weight: ``[N, K]``, any floating dtype; read only.
        matrix: float32 ``[K, K]``, the sum of ``x x^T`` over calibration inputs.
        precision: 3, 4 or 8 bits, groups and symmetry.
        options: defaults when ``None``.

    Raises:
        SpecError: weight or matrix have values that are not finite, or their shapes differ.
    """
    options = options or GptqOptions()
    if tuple(matrix.shape) != (weight.shape[1],) * 2:
        raise SpecError(
            f"gptq: found a matrix {list(matrix.shape)} for a weight {list(weight.shape)}"
        )
    if not bool(torch.isfinite(matrix).all()):
        raise SpecError("gptq: found calibration inputs that are not finite")
    columns = weight.to(torch.float32).T.contiguous()  # [K, N]
    order: Tensor | None = None
    if options.order == "full":
        order = _by_importance(matrix)
        columns, matrix = columns[order], matrix[order][:, order]
    diagonal = matrix.diagonal()
    importance = diagonal + options.damping * diagonal.mean() if options.search else None
    plain = _Rounding(columns, precision, importance)
    plain.fit_all()
    corrected = _round_with_correction(columns, matrix, precision, importance, options)
    # The algorithm is greedy: plain rounding can be better for a row.
    is_worse = _output_error(corrected, columns, matrix) > _output_error(plain, columns, matrix)
    corrected.copy_rows(plain, is_worse)
    return corrected.weight(order)


def round_integers(
    weight: Tensor, precision: Precision, importance: Tensor | None = None
) -> IntegerWeight:
    """Round every weight to the nearest point of its group's integer grid.

    Args:
        weight: ``[N, K]``, any floating dtype; read only.
        precision: 3, 4 or 8 bits, groups and symmetry.
        importance: ``[K]`` for a search of the grid, or ``None`` for the full range.

    Raises:
        SpecError: the weight holds a value that is not finite.
    """
    rounding = _Rounding(weight.to(torch.float32).T.contiguous(), precision, importance)
    rounding.fit_all()
    return rounding.weight(None)


class _Rounding:
    """Columns ``[K, N]`` that are being rounded: the grids of their groups and their codes.

    Attributes:
        codes: whole float32 numbers ``[K, N]``.
        scales: ``[G, N]``.
        zero_points: whole float32 numbers ``[G, N]``.
        group_size: columns that share a grid.
    """

    def __init__(self, columns: Tensor, precision: Precision, importance: Tensor | None) -> None:
        self.group_size = precision.effective_group(columns.shape[0])
        self.codes = torch.zeros_like(columns)
        self.scales = columns.new_ones(columns.shape[0] // self.group_size, columns.shape[1])
        self.zero_points = torch.zeros_like(self.scales)
        self._columns = columns
        self._precision = precision
        self._importance = importance

    def fit(self, group: int) -> None:
        """Choose the grid of a group for the current values of its columns."""
        part = slice(group * self.group_size, (group + 1) * self.group_size)
        importance = None if self._importance is None else self._importance[part]
        grid = fit_integer_grid(self._columns[part], self._precision, importance)
        self.scales[group], self.zero_points[group] = grid

    def fit_all(self) -> None:
        """Choose the grid of every group, and round every column to it."""
        for group in range(len(self.scales)):
            self.fit(group)
            part = slice(group * self.group_size, (group + 1) * self.group_size)
            grid = self.scales[group], self.zero_points[group]
            self.codes[part] = integer_codes(self._columns[part], *grid, self._precision.bits)

    def round(self, column: int, values: Tensor) -> Tensor:
        """Round ``values`` ``[N]`` to the grid of a column's group; return the rounded values."""
        group = column // self.group_size
        scale, zero_point = self.scales[group], self.zero_points[group]
        codes = integer_codes(values, scale, zero_point, self._precision.bits)
        self.codes[column] = codes
        return codes.sub_(zero_point).mul_(scale)

    def dequantize(self) -> Tensor:
        """Return the rounded columns ``[K, N]``."""
        grouped = self.codes.view(len(self.scales), self.group_size, -1)
        return ((grouped - self.zero_points[:, None]) * self.scales[:, None]).flatten(0, 1)

    def copy_rows(self, other: _Rounding, rows: Tensor) -> None:
        """Copy the output features selected by a mask ``[N]`` from ``other``."""
        for mine, theirs in (
            (self.codes, other.codes),
            (self.scales, other.scales),
            (self.zero_points, other.zero_points),
        ):
            mine[:, rows] = theirs[:, rows]

    def weight(self, order: Tensor | None) -> IntegerWeight:
        """Return the result; ``order`` is the input feature of every column."""
        return IntegerWeight(
            precision=self._precision,
            codes=self.codes.to(torch.uint8).T.contiguous(),
            scales=self.scales.T.contiguous(),
            zero_points=self.zero_points.to(torch.int32).T.contiguous(),
            order=None if order is None else order.to(torch.int32),
        )


def _round_with_correction(
    columns: Tensor,
    matrix: Tensor,
    precision: Precision,
    importance: Tensor | None,
    options: GptqOptions,
) -> _Rounding:
    """Round ``columns`` ``[K, N]`` one after another, correcting later ones for each error."""
    columns = columns.clone()
    rounding = _Rounding(columns, precision, importance)
    walk: list[int] | None = None
    if options.order == "static":
        # The groups are those of the stored order, so their grids are known in advance.
        rounding.fit_all()
        by_importance = _by_importance(matrix)
        columns, matrix = columns[by_importance], matrix[by_importance][:, by_importance]
        walk = by_importance.tolist()
    factor = _inverse_factor(matrix, options.damping)
    diagonal = factor.diagonal().tolist()
    for batch in _batches(len(columns), rounding.group_size):
        errors = torch.empty_like(columns[batch])  # [B, N]
        for i in range(batch.start, batch.stop):
            if walk is None and i % rounding.group_size == 0:
                rounding.fit(i // rounding.group_size)
            rounded = rounding.round(i if walk is None else walk[i], columns[i])
            error = torch.sub(columns[i], rounded).div_(diagonal[i])
            later = slice(i + 1, batch.stop)
            columns[later].addr_(factor[i, later], error, alpha=-1)
            errors[i - batch.start] = error
        columns[batch.stop :].addmm_(factor[batch, batch.stop :].T, errors, alpha=-1)
    return rounding


def _by_importance(matrix: Tensor) -> Tensor:
    """Return the input features by second moment, largest first."""
    return matrix.diagonal().argsort(descending=True, stable=True)


def _batches(columns: int, group: int) -> Iterator[slice]:
    """Yield batches of columns; a group begins with a batch or lies inside one."""
    step = columns if _BATCH % group == 0 else group
    for start in range(0, columns, step):
        for first in range(start, start + step, _BATCH):
            yield slice(first, min(first + _BATCH, start + step, columns))


def _inverse_factor(matrix: Tensor, damping: float) -> Tensor:
    """Return the upper triangular U with ``U^T U`` the inverse of the damped matrix: ``[K, K]``.

    With J the reversal of rows, ``J A J = L L^T`` gives ``U = J L^-1 J``. The damping grows until
    the decomposition succeeds in float32.
    """
    identity = torch.eye(len(matrix), device=matrix.device)
    mean = matrix.diagonal().mean()
    while mean > 0 and damping <= _MAX_DAMPING:
        damped = matrix + damping * mean * identity
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not failed:
            inverse: Tensor = torch.linalg.solve_triangular(lower, identity, upper=False)
            return inverse.flip(0, 1).contiguous()
        damping *= 10
    return identity


def _output_error(rounding: _Rounding, columns: Tensor, matrix: Tensor) -> Tensor:
    """Return the squared error of every output, summed over calibration inputs: ``[N]``."""
    difference = rounding.dequantize().sub_(columns)  # [K, N]
    return difference.mul(matrix @ difference).sum(0)
