"""Library kernels for NVIDIA GPUs: torch's 4-bit and int8 products, and bitsandbytes.

A backend that a machine lacks (the GPU is too old, a package is not installed) supports nothing,
and the reference runs. Not yet run on a GPU: ``scripts/gpu_check`` tests and measures these
backends.

Shape legend: M rows of x, N output features, K input features, G groups of a row.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from llmpq.kernels.base import (
    SCALE_DTYPES,
    Capability,
    KernelBackend,
    PackedWeight,
    PreparedWeight,
    ProductParts,
)
from llmpq.kernels.gpu import triton_int
from llmpq.spec.devices.figures import LEAST_CAPABILITY
from llmpq.spec.precision import Precision, linear_bytes

_HALF_DTYPES = (torch.bfloat16, torch.float16)
_INT4_DTYPES = (torch.bfloat16,)  # the kernel takes no other
_MANY_ROWS = 64
_OUTLIER = 6.0  # LLM.int8(), Sec. 3.2: so large a value stays in floats
_LEAST_INT8_ROWS = 32  # cuBLAS rejects 16 rows and fewer
_INT8_ROW_MULTIPLE = 8


def cuda_backends() -> tuple[KernelBackend, ...]:
    """Return a backend of every kind for GPUs, the one preferred first.

    bitsandbytes runs on a CPU too, where it is never chosen unless asked for by name.
    """
    return (
        CudaInt4Backend(),
        triton_int.TritonIntBackend(),
        BitsAndBytesInt8Backend("cuda"),
        CudaInt8Backend(),
        BitsAndBytesInt8Backend("cpu"),
    )


class CudaInt4Backend(KernelBackend):
    """``aten::_weight_int4pack_mm`` (tinygemm) for few rows; read back and multiply for many.

    The kernel's time grows with every 16 rows. From 64 rows on, where Triton is at hand to read the
    layout back, the weight is written out in bf16 and the library's own matmul runs.
    """

    name = "cuda_int4"
    capability = Capability(
        device_types=("cuda",),
        bits=(4,),
        dtypes=_INT4_DTYPES,
        default_dtypes=_INT4_DTYPES,
        shapes="asymmetric, N a multiple of 8, K of 32, groups of 32, 64, 128 or 256; compute "
        "capability 8.0",
        stored="exactly linear_bytes; calls with many rows make the weight once in bf16 for as "
        "long as the call takes",
        cost="reads a quarter of a bf16 weight for few rows; from 64 rows on a bf16 matmul and one "
        "write of the weight where triton is installed. Not yet measured",
    )

    def fits(self, precision: Precision, out_features: int, in_features: int) -> bool:
        """Return whether the kernel's conditions on shape and group hold."""
        group = precision.effective_group(in_features)
        fits = out_features % 8 == 0 and in_features % 32 == 0 and group in (32, 64, 128, 256)
        return fits and not precision.symmetric

    def runs_on(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether the GPU is new enough."""
        del dtype
        return _is_offered(self.name, device)

    def layout(self, packed: PackedWeight) -> tuple[Tensor, ...]:
        """Return the tensors of ``packed`` as ``linear`` reads them."""
        assert packed.zeros is not None
        words = torch.ops.aten._convert_weight_to_int4pack(
            swapped_halves(packed.codes), inner_tiles(packed.in_features)
        )  # [N/8, K/(16 T), 32, T/2]
        affine = torch.stack((packed.scales.t(), packed.zeros.t()), dim=-1)  # [G, N, 2]
        return (words, affine.contiguous())

    def linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias``; x must have the dtype of the scales."""
        words, affine = weight.tensors
        group = weight.precision.effective_group(weight.in_features)
        rows = x.reshape(-1, weight.in_features).contiguous()  # [M, K]
        if rows.shape[0] >= _MANY_ROWS and _can_read_back(x.device):
            dense = torch.empty(
                (weight.out_features, weight.in_features), dtype=x.dtype, device=x.device
            )
            read_int4pack_into(words, affine, group, dense)
            return F.linear(x, dense, bias)
        y: Tensor = torch.ops.aten._weight_int4pack_mm(rows, words, group, affine)  # [M, N]
        if bias is not None:
            y = y.add_(bias)
        return y.view(*x.shape[:-1], weight.out_features)

    def parts(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> ProductParts:
        """Return the product without its bias; see ``KernelBackend``."""
        return ProductParts(values=self.linear(x, weight, None)[None], bias=bias)

    def joined(self, weights: Sequence[PreparedWeight]) -> PreparedWeight:
        """Return one weight with the outputs of several; see ``KernelBackend``."""
        return triton_int.joined_rows(weights)


def swapped_halves(codes: Tensor) -> Tensor:
    """Return 4-bit codes, two a byte, in the order torch reads: even inputs in the upper half."""
    return (codes << 4) | (codes >> 4)


def inner_tiles(in_features: int) -> int:
    """Return T, the tiles of 16 inputs whose codes a lane reads at once: as many as divide K."""
    return next(tiles for tiles in (8, 4, 2) if in_features % (16 * tiles) == 0)


def read_int4pack_into(words: Tensor, affine: Tensor, group_size: int, out: Tensor) -> None:
    """Write the weight that torch packed on CUDA into ``out`` ``[N, K]``, by a Triton kernel.

    Args:
        words: ``[N/8, K/(16 T), 32, T/2]`` int32.
        affine: scale and zero, ``[G, N, 2]``.
        group_size: inputs that share a scale.
        out: of any floating dtype.
    """
    rows, columns = out.shape
    block_rows, block_columns = 16, 128
    grid = (math.ceil(rows / block_rows), math.ceil(columns / block_columns))
    with triton_int.current_device_of(out):
        triton_int.kernels().read_int4pack_kernel[grid](
            words, affine, out, rows, columns, group_size,
            2 * words.shape[3], block_rows, block_columns,
        )  # fmt: skip


@lru_cache(maxsize=16)
def _can_read_back(device: torch.device) -> bool:
    """Return whether Triton runs on ``device`` and this torch packs as the kernel reads."""
    if triton_int.launch_failure(device, torch.bfloat16) is not None:
        return False
    codes = torch.arange(16 * 128, device=device).mul_(7).remainder_(13).view(16, 128)
    pairs = ((codes[:, ::2] << 4) | codes[:, 1::2]).to(torch.uint8)
    words = torch.ops.aten._convert_weight_to_int4pack(pairs, inner_tiles(128))
    affine = torch.zeros((1, 16, 2), dtype=torch.bfloat16, device=device)
    affine[..., 0] = 1
    out = torch.empty((16, 128), dtype=torch.bfloat16, device=device)
    read_int4pack_into(words, affine, 128, out)
    return torch.equal(out, (codes - 8).to(torch.bfloat16))


class _Int8Backend(KernelBackend):
    """What the two 8-bit backends share: the weights they take."""

    capability: Capability
    reads_rows = True
    scale_steps = 1.0  # steps between zero and what a stored scale stands for

    def rows(self, weight: PreparedWeight, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows of a weight; see ``KernelBackend``."""
        codes, scales = weight.tensors  # [N, K], [N]
        steps = scales[ids].to(torch.float32).unsqueeze(-1) / self.scale_steps
        return codes[ids].to(torch.float32).mul_(steps).to(dtype)

    def fits(self, precision: Precision, out_features: int, in_features: int) -> bool:
        """Return whether the weight is one of LLM.int8()'s."""
        per_channel = precision.effective_group(in_features) == in_features
        fits = out_features % 8 == 0 and in_features % 8 == 0
        return per_channel and fits and precision.symmetric

    def runs_on(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether the device is a CPU, or a GPU that is new enough."""
        del dtype
        return device.type == "cpu" or _is_offered(self.name, device)


class CudaInt8Backend(_Int8Backend):
    """LLM.int8() by ``torch._int_mm``: one scale a row of x, outliers in floats.

    For machines without bitsandbytes. Finding the outliers waits for the GPU once a call.

    Args:
        device_type: ``cuda``; ``cpu`` in tests.
    """

    name = "cuda_int8"

    def __init__(self, device_type: str = "cuda") -> None:
        self.capability = Capability(
            device_types=(device_type,),
            bits=(8,),
            dtypes=SCALE_DTYPES,
            default_dtypes=_HALF_DTYPES,
            shapes="symmetric, one scale a channel, N and K multiples of 8; compute capability 7.5",
            stored="exactly linear_bytes",
            cost="an int8 matmul and a few passes over x and y; rounds activations to 8 bits "
            "except where one exceeds 6. Not yet measured",
        )

    def layout(self, packed: PackedWeight) -> tuple[Tensor, ...]:
        """Return the tensors of ``packed`` as ``linear`` reads them."""
        return (packed.signed_rows(slice(None)), packed.scales.view(-1))

    def linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias``, x rounded to 8 bits a row except for outliers."""
        codes, scales = weight.tensors  # [N, K], [N]
        rows = x.reshape(-1, weight.in_features)  # [M, K]
        if rows.shape[0] == 0:
            return x.new_empty((*x.shape[:-1], weight.out_features))
        # Value by value and not column by column as in the paper: no row's numbers may depend on
        # which others share its micro-batch. Columns only say which weights are needed.
        is_large = rows.abs() >= _OUTLIER
        columns = is_large.any(dim=0).nonzero().view(-1)
        small = rows.to(torch.float32).masked_fill(is_large, 0)
        row_scales = small.abs().amax(dim=1, keepdim=True).div_(127).clamp_min_(1e-30)  # [M, 1]
        rounded = small.div_(row_scales).round_().to(torch.int8)
        y = _int8_product(rounded, codes).mul_(row_scales)
        if columns.numel() > 0:
            large = rows[:, columns].to(torch.float32).masked_fill(~is_large[:, columns], 0)
            y += large @ codes[:, columns].to(torch.float32).t()
        y = y.mul_(scales.to(torch.float32))  # [M, N]
        if bias is not None:
            y = y.add_(bias)
        return y.to(x.dtype).view(*x.shape[:-1], weight.out_features)


def _int8_product(rows: Tensor, codes: Tensor) -> Tensor:
    """Return ``rows @ codes.T`` of int8 ``[M, K]`` and ``[N, K]`` as float32 ``[M, N]``."""
    count = rows.shape[0]
    padded = max(_LEAST_INT8_ROWS, -(-count // _INT8_ROW_MULTIPLE) * _INT8_ROW_MULTIPLE)
    rows = F.pad(rows, (0, 0, 0, padded - count))
    return torch._int_mm(rows, codes.t())[:count].to(torch.float32)


class BitsAndBytesInt8Backend(_Int8Backend):
    """LLM.int8() by bitsandbytes, with codes and scales of our own.

    Its operators are called and not its modules: those keep a second copy of the weight, and on a
    CPU take a path up to 29 times slower while they are in training mode. A column with an outlier
    in any row leaves the 8-bit product of all rows, so a row's last bits depend on its neighbours.

    Args:
        device_type: ``cuda`` or ``cpu``.
    """

    scale_steps = 127.0  # the library keeps the largest weight of a channel

    def __init__(self, device_type: str) -> None:
        self.name = "bnb_int8" if device_type == "cuda" else f"bnb_int8_{device_type}"
        self.capability = Capability(
            device_types=(device_type,),
            bits=(8,),
            dtypes=SCALE_DTYPES,
            default_dtypes=_HALF_DTYPES if device_type == "cuda" else (),
            shapes="symmetric, one scale a channel, N and K multiples of 8; bitsandbytes installed",
            stored="linear_bytes with scales in float32",
            cost="an int8 matmul; rounds activations to 8 bits through float16, except where one "
            "exceeds 6. On a CPU .54 of a bf16 matmul for one row, 1.35 for 32, .72 for 512",
        )

    def runs_on(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether bitsandbytes is installed and the GPU is new enough."""
        return super().runs_on(device, dtype) and triton_int.why_missing("bitsandbytes") is None

    def stored_bytes(
        self, precision: Precision, dtype: torch.dtype, out_features: int, in_features: int
    ) -> int:
        """Return ``linear_bytes`` as if the scales were float32, which they are."""
        del dtype
        return linear_bytes(out_features, in_features, precision, 4)

    def layout(self, packed: PackedWeight) -> tuple[Tensor, ...]:
        """Return the tensors of ``packed`` as ``linear`` reads them."""
        return (
            packed.signed_rows(slice(None)),
            packed.scales.view(-1).to(torch.float32) * self.scale_steps,
        )

    def linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias``, x rounded to 8 bits a row except for outliers."""
        codes, largest = weight.tensors  # [N, K], [N]
        rows = x.reshape(-1, weight.in_features)  # [M, K]
        if rows.shape[0] == 0:
            return x.new_empty((*x.shape[:-1], weight.out_features))
        functional = importlib.import_module("bitsandbytes.functional")
        # It sets outliers to zero and back again while it works: never in a tensor of the caller.
        halves = rows.to(torch.float16, copy=True, memory_format=torch.contiguous_format)
        rounded, row_largest, columns = functional.int8_vectorwise_quant(halves, threshold=_OUTLIER)
        y: Tensor = torch.ops.bitsandbytes.int8_mixed_scaled_mm(
            rows, rounded, codes, row_largest, largest, columns, bias
        )[0]
        return y.view(*x.shape[:-1], weight.out_features)


def _is_offered(name: str, device: torch.device) -> bool:
    """Return whether a GPU is an NVIDIA one of the compute capability that a kernel needs."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY[name]
