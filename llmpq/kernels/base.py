"""What kernels share: the packed form of a weight, the base class of backends, and their device.

A ``PackedWeight`` is one quantized matrix: integers packed to the bit, scales, zeros.
``llmpq.spec.precision.linear_bytes`` gives its size in bytes. Quantizers (``llmpq.quant``) write it
and kernel backends read it. Every rank, profiler and check calls ``open_device`` for its
accelerator.

Shape legend: N output features, K input features, G groups of a row, b bits, R rows of a block.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from llmpq.errors import SpecError
from llmpq.spec.precision import Precision, linear_bytes

PACKED_BITS: tuple[int, ...] = (3, 4, 8)
"""Bitwidths that have a packed form; 16-bit weights are plain tensors."""

SCALE_DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)

_BLOCK_ELEMENTS = 1 << 18  # a float32 block of 1 MiB stays in a core's own cache
_STORAGE_BY_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedWeight:
    """A weight matrix ``[out_features, in_features]`` as integer codes with scales.

    ``weight = (code - 2^(b-1)) * scale + zero`` with one scale and zero a group of consecutive
    inputs of a row, as in torch's int4 kernels.

    Attributes:
        out_features: N.
        in_features: K.
        precision: bits, group size and symmetry; its method only says who chose the codes.
        codes: uint8 ``[N, ceil(K b / 8)]``, each row one little-endian bit stream.
        scales: ``[N, G]`` in the run's dtype, all positive.
        zeros: ``[N, G]`` in the same dtype; ``None`` exactly when the precision is symmetric.
        order: int32 ``[K]``, the input feature of every stored column, when a quantizer grouped
            them by importance (GPTQ's act-order); ``None`` when columns stand in their own order.
    """

    out_features: int
    in_features: int
    precision: Precision
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None = None

    def __post_init__(self) -> None:
        bits = self.precision.bits
        if bits not in PACKED_BITS:
            raise SpecError(f"packed weight: found {bits} bits, expected one of {PACKED_BITS}")
        if (self.zeros is None) != self.precision.symmetric:
            found = "no zeros" if self.zeros is None else "zeros"
            raise SpecError(f"packed weight: found {found} with precision {self.precision}")
        rows, groups = self.out_features, self.in_features // self.group_size
        self._check("codes", self.codes, (rows, packed_row_bytes(self.in_features, bits)))
        self._check("scales", self.scales, (rows, groups))
        if self.zeros is not None:
            self._check("zeros", self.zeros, (rows, groups))
        if self.order is not None:
            self._check_order(self.order)

    def _check(self, name: str, tensor: Tensor, shape: tuple[int, int]) -> None:
        dtypes = (torch.uint8,) if name == "codes" else SCALE_DTYPES
        if name == "zeros":
            dtypes = (self.scales.dtype,)
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            raise SpecError(
                f"packed weight [{self.out_features}, {self.in_features}] {self.precision}: "
                f"found {name} {tensor.dtype} {list(tensor.shape)}, "
                f"expected {' or '.join(map(str, dtypes))} {list(shape)}"
            )

    def _check_order(self, order: Tensor) -> None:
        count = self.in_features
        if tuple(order.shape) != (count,) or order.dtype != torch.int32:
            found = f"{order.dtype} {list(order.shape)}"
        elif not torch.equal(order.sort().values, torch.arange(count, device=order.device)):
            found = "features left out or repeated"
        else:
            return
        raise SpecError(f"packed weight: found an order of {found}, expected all of [0, {count})")

    @property
    def group_size(self) -> int:
        """Inputs that share one scale; K when there is one scale a row."""
        return self.precision.effective_group(self.in_features)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the scales: that of the run the weight was quantized for."""
        return self.scales.dtype

    @property
    def nbytes(self) -> int:
        """Bytes held by the tensors: ``spec.precision.linear_bytes``, and 4 K for an order."""
        optional = sum(t.nbytes for t in (self.zeros, self.order) if t is not None)
        return self.codes.nbytes + self.scales.nbytes + optional

    def to(self, device: torch.device | str) -> PackedWeight:
        """Return the weight on ``device``; it shares every tensor that is there already."""
        return replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            zeros=None if self.zeros is None else self.zeros.to(device),
            order=None if self.order is None else self.order.to(device),
        )

    def in_stored_order(self) -> PackedWeight:
        """Return the weight for inputs already permuted to stored order; shares every tensor."""
        return self if self.order is None else replace(self, order=None)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight ``[N, K]`` in ``dtype``, rounded once from float32."""
        out = torch.empty(
            (self.out_features, self.in_features), dtype=dtype, device=self.codes.device
        )
        self.dequantize_into(out)
        return out

    def dequantize_into(self, out: Tensor) -> None:
        """Write the weight into ``out`` ``[N, K]``, of any floating dtype.

        Works a block of rows at a time, so that no temporary grows with the matrix.
        """
        for rows in row_blocks(self.out_features, self.in_features):
            block = self.signed_rows(rows).to(torch.float32)  # [R, K]
            grouped = block.view(block.shape[0], -1, self.group_size)  # [R, G, K/G]
            grouped.mul_(self.scales[rows].to(torch.float32).unsqueeze(-1))
            if self.zeros is not None:
                grouped.add_(self.zeros[rows].to(torch.float32).unsqueeze(-1))
            if self.order is None:
                out[rows].copy_(block)
            else:
                out[rows].index_copy_(1, self.order.long(), block.to(out.dtype))

    def signed_rows(self, rows: slice) -> Tensor:
        """Return ``code - 2^(b-1)`` of some rows, columns as stored: int8 ``[R, K]``."""
        return unpack_signed(self.codes[rows], self.precision.bits, self.in_features)


def packed_row_bytes(in_features: int, bits: int) -> int:
    """Return the bytes of one packed row: whole bytes, no other padding."""
    return -(-in_features * bits // 8)


def row_blocks(rows: int, row_elements: int, multiple: int = 1) -> Iterator[slice]:
    """Yield row slices that fit a cache; all but the last are a ``multiple`` of rows long."""
    step = max(1, _BLOCK_ELEMENTS // (max(1, row_elements) * multiple)) * multiple
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes ``[N, K]`` in ``[0, 2^b)``, uint8, into rows of bytes ``[N, ceil(K b / 8)]``.

    Code ``k`` of a row takes bits ``[k b, (k + 1) b)`` of the row's little-endian bit stream.
    Codes are merged inside machine words: 20 and 3 times faster at 4 and 3 bits than a shift and a
    sum for every code.
    """
    rows, columns = codes.shape
    if bits == 8:
        return codes
    count = 8 // math.gcd(bits, 8)
    padded = torch.nn.functional.pad(codes, (0, -columns % count)).contiguous()
    if bits == 4:
        pairs = padded.view(torch.int16)  # low code + high code * 2^8
        return (pairs >> 4).bitwise_or_(pairs).to(torch.uint8)
    words = padded.view(torch.int64)  # eight codes of three bits, one a byte
    for shift, mask in ((5, 0x003F003F003F003F), (10, 0x00000FFF00000FFF), (20, 0xFFFFFF)):
        words = (words >> shift).bitwise_or_(words).bitwise_and_(mask)
    packed = words.view(torch.uint8).view(rows, -1, 8)[..., :3].reshape(rows, -1)
    return packed[:, : packed_row_bytes(columns, bits)].contiguous()


def unpack_signed(packed: Tensor, bits: int, in_features: int) -> Tensor:
    """Return ``code - 2^(b-1)`` as int8 ``[N, K]`` from rows of bytes; undoes ``pack_codes``.

    One table lookup yields all codes of an index, which is faster in plain torch than shifts.
    """
    if bits == 8:
        return torch.bitwise_xor(packed, 0x80).view(torch.int8)
    index = _twelve_bit_indices(packed) if bits == 3 else packed.to(torch.int32)
    table = _decode_table(bits, packed.device)
    values = table.index_select(0, index.reshape(-1)).view(torch.int8)
    return values.view(packed.shape[0], -1)[:, :in_features]


def _twelve_bit_indices(packed: Tensor) -> Tensor:
    """Split every three bytes into two 12-bit numbers, four 3-bit codes each: int32 ``[N, -1]``."""
    rows, columns = packed.shape
    if columns % 3:
        packed = torch.nn.functional.pad(packed, (0, -columns % 3))
    triples = packed.reshape(rows, -1, 3).to(torch.int32)
    low, middle, high = triples.unbind(-1)
    pairs = torch.stack((low | ((middle & 0x0F) << 8), (middle >> 4) | (high << 4)), dim=-1)
    return pairs.view(rows, -1)


@lru_cache(maxsize=16)
def _decode_table(bits: int, device: torch.device) -> Tensor:
    """Return the signed codes of every index, packed into one integer an entry.

    4 bits: 256 entries of two codes; 3 bits: 4096 entries of four. Both fit a first-level cache.
    """
    width = 12 if bits == 3 else 8
    count = width // bits
    index = torch.arange(1 << width, device=device).unsqueeze(-1)
    shifts = torch.arange(count, device=device) * bits
    codes = ((index >> shifts) & ((1 << bits) - 1)) - (1 << (bits - 1))  # [2^width, count]
    return codes.to(torch.int8).view(_STORAGE_BY_BYTES[count]).view(-1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedWeight:
    """A weight in the layout of one backend: the only copy of it that stays in memory.

    Attributes:
        backend: name of the backend that prepared it and alone can read it.
        out_features: N.
        in_features: K.
        precision: how the weight was quantized.
        tensors: the backend's own layout.
        handle: what a compiled backend passes at every call; made from ``tensors``, owns nothing.
    """

    backend: str
    out_features: int
    in_features: int
    precision: Precision
    tensors: tuple[Tensor, ...]
    handle: object | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held, including the padding inside oneDNN's opaque layouts."""
        return sum(tensor_bytes(tensor) for tensor in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProductParts:
    """What a product returns to a kernel that adds up the parts of it as it reads them.

    Attributes:
        values: ``[P, M, N]``, or heads ``[P, M, H, d]``: parts to be summed, by any strides but one
            for the last.
        bias: ``[N]`` or ``[H, d]``, yet to be added; ``None`` for none.
    """

    values: Tensor
    bias: Tensor | None = None

    def viewed(self, view: Callable[[Tensor], Tensor]) -> ProductParts:
        """Return a view of the outputs: of the last dimensions of both tensors."""
        bias = None if self.bias is None else view(self.bias)
        return ProductParts(values=view(self.values), bias=bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """One row of the capability table: where a backend runs, for which weights, at what cost.

    Attributes:
        device_types: torch device types; empty means any.
        bits: stored bitwidths.
        dtypes: dtypes of activations and scales it accepts.
        default_dtypes: those of them for which it is chosen by default.
        shapes: the shapes and groups it accepts, in words; ``supports`` decides.
        stored: bytes it keeps, compared with ``spec.precision.linear_bytes``.
        cost: time of a product, compared with a bf16 product.
    """

    device_types: tuple[str, ...]
    bits: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    default_dtypes: tuple[torch.dtype, ...]
    shapes: str
    stored: str
    cost: str


class KernelBackend(ABC):
    """An algorithm that multiplies activations by a packed weight.

    Attributes:
        name: the name a user gives; its key in the registry.
        capability: its row of the capability table.
        reads_rows: whether it has ``rows``.
    """

    name: str
    capability: Capability
    reads_rows: bool = False

    def supports(
        self,
        device: torch.device | str,
        precision: Precision,
        dtype: torch.dtype,
        out_features: int,
        in_features: int,
    ) -> bool:
        """Return whether it can run a weight ``[out_features, in_features]`` on a device.

        A GPU without a number is the current one of this thread.
        """
        row, device = self.capability, torch.device(device)
        on_device = not row.device_types or device.type in row.device_types
        is_covered = on_device and precision.bits in row.bits and dtype in row.dtypes
        fits = is_covered and self.fits(precision, out_features, in_features)
        return fits and self.runs_on(device, dtype)

    @abstractmethod
    def fits(self, precision: Precision, out_features: int, in_features: int) -> bool:
        """Return whether shape, group and machine allow a weight that ``capability`` covers."""

    def runs_on(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether this device, of a type that ``capability`` names, can run it."""
        del device, dtype
        return True

    def stored_bytes(
        self, precision: Precision, dtype: torch.dtype, out_features: int, in_features: int
    ) -> int:
        """Return the bytes that ``prepare`` keeps: ``linear_bytes`` unless overridden."""
        return linear_bytes(out_features, in_features, precision, dtype.itemsize)

    def prepare(self, packed: PackedWeight) -> PreparedWeight:
        """Return the weight in the backend's layout; keeps no reference to ``packed``.

        Raises:
            SpecError: the backend does not support ``packed`` in the dtype of its scales.
        """
        self.check_supported(packed)
        return PreparedWeight(
            backend=self.name,
            out_features=packed.out_features,
            in_features=packed.in_features,
            precision=packed.precision,
            tensors=self.layout(packed),
        )

    def layout(self, packed: PackedWeight) -> tuple[Tensor, ...]:
        """Return the tensors of ``packed`` as ``linear`` reads them; see ``prepare``."""
        raise NotImplementedError

    @abstractmethod
    def linear(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias`` for ``x`` ``[..., K]``: ``[..., N]`` in x's dtype."""

    def parts(self, x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> ProductParts:
        """Return the same for ``x`` ``[M, K]``, contiguous, as far as it is cheapest to compute."""
        return ProductParts(values=self.linear(x, weight, bias)[None])

    def joined(self, weights: Sequence[PreparedWeight]) -> PreparedWeight | None:
        """Return one weight with the outputs of several, in their order.

        They have the same inputs and precision. ``None`` where the layout does not allow it.
        """
        del weights
        return None

    def rows(self, weight: PreparedWeight, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows of a weight, as an embedding looks them up.

        Args:
            weight: of this backend, whose ``reads_rows`` is True.
            ids: rows, int64 ``[...]``.
            dtype: of the result.

        Returns:
            ``[..., K]``, dequantized in float32 and rounded once.
        """
        raise NotImplementedError

    def check_supported(self, packed: PackedWeight) -> None:
        """Raise ``SpecError`` when the backend does not support ``packed``."""
        device = packed.codes.device
        shape = (packed.out_features, packed.in_features)
        if not self.supports(device, packed.precision, packed.dtype, *shape):
            raise SpecError(
                f"kernel '{self.name}': found a {packed.precision} weight {list(shape)} with "
                f"{packed.dtype} scales on '{device}', expected {self.capability.shapes}"
            )


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes a tensor holds, opaque layouts of oneDNN included."""
    if tensor.layout == torch._mkldnn:  # type: ignore[attr-defined]  # absent from torch's stubs
        return int(torch.ops.mkldnn._nbytes(tensor))
    return tensor.nbytes


def open_device(device: torch.device) -> torch.device:
    """Make a device the current one of this thread; return it with its number.

    A thread starts with GPU 0 as its current device, whatever other threads have chosen: Triton
    would launch there, and libraries would allocate there. Each thread that uses a GPU calls this.

    On CUDA, cuDNN's attention is disabled for the process. torch 2.11 prefers it on compute
    capability 9.0 and above, and it builds an execution plan of 0.1 to 0.5 s for every new shape
    (huggingface/transformers#48163, modelscope/FunASR#3704); shapes of a step are new all the time.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
        device = numbered(device)
        torch.cuda.set_device(device.index)
    elif device.type == "xpu":
        device = numbered(device)
        torch.xpu.set_device(device.index)
    return device


def numbered(device: torch.device) -> torch.device:
    """Return a device with its number: that of the current one where it has none."""
    if ":" in str(device) or device.type not in ("cuda", "xpu"):
        return device
    current = torch.cuda.current_device() if device.type == "cuda" else torch.xpu.current_device()
    return torch.device(device.type, current)


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of long sums on a device: float64, or float32 where there is none.

    Metal has no float64, and neither have Intel's Arc GPUs.
    """
    if device.type == "mps":
        return torch.float32
    if device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64:
        return torch.float32
    return torch.float64
