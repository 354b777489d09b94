"""torch's quantized CPU kernels: int4pack, and oneDNN's 8-bit matmul with u8 activations.

Used where the compiled kernels (``cpu_packed``, ``cpu_llm_int8``), which are faster at every shape
measured (``benchmarks/kernel_times.py``), are not available.

Shape legend: M rows of x, N output features, K input features, G groups of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmpq.kernels.base import (
    SCALE_DTYPES,
    Capability,
    KernelBackend,
    PackedWeight,
    PreparedWeight,
    row_blocks,
)
from llmpq.kernels.cpu.native import has_u8_matmul, u8_matmul
from llmpq.spec.precision import Precision, linear_bytes

_HALF_DTYPES = (torch.bfloat16, torch.float16)
OUTLIER_THRESHOLD = 6.0
"""Activations from here on are outliers, as in LLM.int8() (Dettmers et al. 2022, Sec. 3.2)."""

_INT4_DTYPES = (torch.bfloat16,)  # torch has the others in scalar code, 20 to 70 times slower


class CpuInt4Backend(KernelBackend):
    """``aten::_weight_int4pack_mm_for_cpu``: weight-only, on 4-bit codes as they are.

    The bytes are those of ``linear_bytes`` at 4 bits: codes, and scale and zero side by side. A
    symmetric weight would need zeros that ``linear_bytes`` does not count, so the reference runs
    it.
    """

    name = "cpu_int4"
    capability = Capability(
        device_types=("cpu",),
        bits=(4,),
        dtypes=_INT4_DTYPES,
        default_dtypes=_INT4_DTYPES,
        shapes="asymmetric, N a multiple of 16, groups of 32, 64, 128 or 256",
        stored="exactly linear_bytes",
        cost="0.25 to 0.5 of a bf16 matmul for one row, about 2.5 times it at 128 rows; "
        "grows with every row",
    )

    def fits(self, precision: Precision, out_features: int, in_features: int) -> bool:
        """Return whether the kernel's conditions on shape and group hold."""
        group = precision.effective_group(in_features)
        fits = out_features % 16 == 0 and group in (32, 64, 128, 256)
        return fits and not precision.symmetric

    def layout(self, packed: PackedWeight) -> tuple[Tensor, ...]:
        """Return the tensors of ``packed`` as ``linear`` reads them."""
        assert packed.zeros is not None
        shape = (packed.out_features, packed.in_features // 2)
        layout = torch.empty(shape, dtype=torch.uint8)  # [N, K/2]
        # The layout repeats every 64 rows at most, so blocks of 64 give the same bytes as the
        # whole would, without an int32 copy of the whole.
        for rows in row_blocks(packed.out_features, packed.in_features, multiple=64):
            codes = packed.signed_rows(rows).to(torch.int32).add_(8)
            layout[rows] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        affine = torch.stack((packed.scales.t(), packed.zeros.t()), dim=-1)  # [G, N, 2]
        return (layout, affine.contiguous())

    def linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias``; x must have the dtype of the scales."""
        layout, affine = weight.tensors
        group = weight.precision.effective_group(weight.in_features)
        rows = x.reshape(-1, weight.in_features)  # [M, K]
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, layout, group, affine)
        if bias is not None:
            y = y.add_(bias)
        return y.view(*x.shape[:-1], weight.out_features)


class CpuInt8Backend(KernelBackend):
    """oneDNN's u8 x s8 matmul: activations are rounded to 8 bits, one scale a row of x.

    Numbers of ``OUTLIER_THRESHOLD`` and more would cost all others of their row their precision, so
    they are multiplied apart, with a scale of their own: a second product, in calls that have
    any. It is the default of 16-bit runs only; a float32 run asks for exactness.
    """

    name = "cpu_int8"
    capability = Capability(
        device_types=("cpu",),
        bits=(8,),
        dtypes=SCALE_DTYPES,
        default_dtypes=_HALF_DTYPES,
        shapes="symmetric, one scale a channel, N and K multiples of 64, a CPU with VNNI",
        stored="linear_bytes and 4 bytes an output channel of oneDNN's own",
        cost="about half of a bf16 matmul at 4096 features, 0.7 to 1.3 of it at 1024; rounds "
        "activations to 8 bits",
    )

    def fits(self, precision: Precision, out_features: int, in_features: int) -> bool:
        """Return whether oneDNN would run it without padding and without saturating.

        Without VNNI, oneDNN adds pairs of u8 x s8 products in 16 bits and saturates.
        """
        per_channel = precision.effective_group(in_features) == in_features
        whole_blocks = out_features % 64 == 0 and in_features % 64 == 0
        return per_channel and whole_blocks and precision.symmetric and has_u8_matmul()

    def stored_bytes(
        self, precision: Precision, dtype: torch.dtype, out_features: int, in_features: int
    ) -> int:
        """Return ``linear_bytes`` and the column sums that undo the activations' zero point."""
        law = linear_bytes(out_features, in_features, precision, dtype.itemsize)
        return law + 4 * out_features

    def layout(self, packed: PackedWeight) -> tuple[Tensor, ...]:
        """Return the tensors of ``packed`` as ``linear`` reads them."""
        codes = packed.signed_rows(slice(None))  # [N, K]
        layout = torch.ops.onednn.qlinear_prepack(codes, None)
        return (layout, packed.scales.view(-1))

    def linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias`` with x rounded to 8 bits a row, outliers apart.

        Only uint8 activations reach a compiled kernel (int8 ones are 800 times slower), so 128 is
        added and named as the zero point. The row's scale is applied afterwards, because the
        kernel knows one activation scale a call.
        """
        layout, scales = weight.tensors
        rows = x.reshape(-1, weight.in_features).to(torch.float32)  # [M, K]
        scales = scales.to(torch.float32)
        is_outlier = rows.abs() >= OUTLIER_THRESHOLD
        if is_outlier.any():
            y = _rounded_product(rows.masked_fill(is_outlier, 0.0), layout, scales)
            y += _rounded_product(rows.masked_fill(~is_outlier, 0.0), layout, scales)
        else:
            y = _rounded_product(rows, layout, scales)
        if bias is not None:
            y = y.add_(bias)
        return y.to(x.dtype).view(*x.shape[:-1], weight.out_features)


def _rounded_product(rows: Tensor, layout: Tensor, scales: Tensor) -> Tensor:
    """Return ``rows @ weight.T`` ``[M, N]``, each row rounded to 8 bits by its largest number."""
    row_scales = rows.abs().amax(dim=1, keepdim=True).div_(127).clamp_min_(1e-30)  # [M, 1]
    unsigned = (rows / row_scales).round_().add_(128).to(torch.uint8)
    return u8_matmul(unsigned, layout, scales).mul_(row_scales)
