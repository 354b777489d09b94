"""The compiled CPU backends: weight-only products, and those with activations at 8 bits.

All keep a weight in tiles that weigh exactly ``linear_bytes`` and never hold a dequantized copy
of it. They exist where there is a C compiler, or a wheel that brought the library; elsewhere their
``supports`` says no and the registry goes on to torch's own kernels (``cpu.torch_kernels``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmpq.kernels.base import Capability, KernelBackend, PreparedWeight
from llmpq.kernels.cpu.kernel_choice import gemv_max_rows, is_float_faster
from llmpq.kernels.cpu.native import (
    has_bf16_products,
    has_int8,
    instruction_set,
    library,
)
from llmpq.kernels.cpu.tiles import (
    TiledWeight,
    bf16_product,
    fits_tiles,
    float_product,
    int8_product,
    packed_int8_product,
    prepared_tiles,
    rows_of_tiles,
    to_tiles,
)
from llmpq.kernels.cpu.torch_kernels import OUTLIER_THRESHOLD
from llmpq.kernels.packed import PACKED_BITS, SCALE_DTYPES, PackedWeight
from llmpq.spec.precision import Precision


class TileBackend(KernelBackend):
    """A backend whose kernels read tiles."""

    reads_rows = True

    def prepare(self, packed: PackedWeight) -> PreparedWeight:
        """Rearrange the codes into tiles."""
        self.check_supported(packed)
        return self.wrap(to_tiles(packed))

    def wrap(self, weight: TiledWeight) -> PreparedWeight:
        """Return a weight in tiles without a copy; ``supports`` must be True for its shape."""
        return prepared_tiles(weight, self.name)

    def rows(self, weight: PreparedWeight, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows of a weight; see ``KernelBackend``."""
        return rows_of_tiles(weight, ids, dtype)


class CpuPackedBackend(TileBackend):
    """Weight-only: codes are decoded in registers or a cache-sized panel, scaled in float32.

    bf16 activations are multiplied as bf16 pairs where the processor can, many rows only where that
    is faster than float32; all others in float32, also float16 ones, for which torch itself has no
    fast matmul on a CPU.
    """

    name = "cpu_packed"
    capability = Capability(
        device_types=("cpu",),
        bits=PACKED_BITS,
        dtypes=SCALE_DTYPES,
        default_dtypes=SCALE_DTYPES,
        shapes="N a multiple of 16, K and groups multiples of 32, a C compiler",
        stored="exactly linear_bytes, and no scratch weight",
        cost="with bf16 products a quarter of a bf16 matmul for one row at 3 and 4 bits, 0.8 of it "
        "for 32 rows and 1.1 times for 512; float32 otherwise. No error beyond that of the codes",
    )

    def fits(self, precision: Precision, out_features: int, in_features: int) -> bool:
        """Return whether the weight is whole tiles, and the library is there."""
        fits = fits_tiles(out_features, in_features, precision.effective_group(in_features))
        return fits and library() is not None

    def wrap(self, weight: TiledWeight) -> PreparedWeight:
        """Return a weight in tiles; the first call on a machine also measures the switch."""
        if weight.dtype == torch.bfloat16 and has_bf16_products():
            gemv_max_rows(weight.precision.bits)
            is_float_faster()
        return super().wrap(weight)

    def linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias``; see ``KernelBackend``."""
        if x.dtype == torch.bfloat16 and has_bf16_products():
            limit = gemv_max_rows(weight.precision.bits)
            return bf16_product(x, weight, bias, limit, in_float=is_float_faster())
        return float_product(x, weight, bias)


class CpuPackedInt8Backend(TileBackend):
    """3- and 4-bit weights, activations rounded to 8 bits in blocks of up to 128 columns.

    llama.cpp rounds them in blocks of 32 (Q8_0). The error is small beside that of the codes
    (``docs/how/quantization.md``), and integer products are two to four times as fast as bf16 ones,
    and as float32 ones on processors without bf16 products. It is the default of 16-bit runs only;
    a float32 run asks for exactness.
    """

    name = "cpu_packed_int8"
    capability = Capability(
        device_types=("cpu",),
        bits=(3, 4),
        dtypes=SCALE_DTYPES,
        default_dtypes=(torch.bfloat16, torch.float16),
        shapes="N a multiple of 16, K and groups multiples of 32, a CPU with AVX2, a C compiler",
        stored="exactly linear_bytes, and no scratch weight",
        cost="0.15 to 0.25 of a bf16 matmul for one row, 0.2 to 0.35 of it for 8 to 512; with AVX2 "
        "alone 0.2 and 0.1 of it, 0.6 of a float32 matmul for 512; rounds activations to 8 bits",
    )

    def fits(self, precision: Precision, out_features: int, in_features: int) -> bool:
        """Return whether the weight is whole tiles, and AVX2 and the library are there."""
        fits = fits_tiles(out_features, in_features, precision.effective_group(in_features))
        return fits and has_int8(instruction_set()) and library() is not None

    def linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias`` with x rounded to 8 bits; see ``KernelBackend``."""
        return packed_int8_product(x, weight, bias)


class CpuLlmInt8Backend(TileBackend):
    """LLM.int8(): each row of x is rounded to 8 bits, but for its outliers, in one pass.

    The default of 16-bit runs only; a float32 run asks for exactness, which weight-only gives.
    """

    name = "cpu_llm_int8"
    capability = Capability(
        device_types=("cpu",),
        bits=(8,),
        dtypes=SCALE_DTYPES,
        default_dtypes=(torch.bfloat16, torch.float16),
        shapes="symmetric, one scale a channel, N a multiple of 16, K of 32, a CPU with AVX2, "
        "a C compiler",
        stored="exactly linear_bytes",
        cost="a quarter of a bf16 matmul for one row, half of it for 32 to 512; with AVX2 alone "
        "0.3 and 0.15 of it, 0.8 of a float32 matmul for 512; rounds activations to 8 bits except "
        "outliers",
    )

    def __init__(self, threshold: float = OUTLIER_THRESHOLD) -> None:
        """Split activations at ``threshold``; infinity splits off none that are finite."""
        self._threshold = threshold

    def fits(self, precision: Precision, out_features: int, in_features: int) -> bool:
        """Return whether the weight is LLM.int8()'s in whole tiles; AVX2, the library are there."""
        per_channel = precision.effective_group(in_features) == in_features
        fits = fits_tiles(out_features, in_features, in_features)
        is_ready = has_int8(instruction_set()) and library() is not None
        return per_channel and precision.symmetric and fits and is_ready

    def linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias`` with x rounded to 8 bits a row, outliers apart."""
        return int8_product(x, weight, bias, self._threshold)
