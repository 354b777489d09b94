"""Weights in the layouts of the compiled kernels, and their products.

3, 4 and 8 bits use tiles, which are the same on every machine and can be filled a block of rows at
a time; 16 bits use panels (both: ``csrc/kernels.h``). Codes take as many bytes as in a
``PackedWeight``; scales and zeros are transposed and keep their dtype.

Shape legend: N output features, K input features, G groups of a row, b bits, R rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL, addressof, byref
from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.kernels.base import PreparedWeight
from llmpq.kernels.cpu.native import DONE, TYPES, Product, Weight, library
from llmpq.kernels.packed import PackedWeight
from llmpq.spec.precision import Precision

TILE_ROWS = 16
TILE_COLUMNS = 32
ROWS_OF_THREAD = 16
"""Rows to look up that justify one more thread."""


def fits_tiles(out_features: int, in_features: int, group_size: int) -> bool:
    """Return whether a weight is whole tiles, none of which spans two groups."""
    whole = out_features % TILE_ROWS == 0 and in_features % TILE_COLUMNS == 0
    return whole and group_size % TILE_COLUMNS == 0


def tiled_shapes(
    out_features: int, in_features: int, precision: Precision, dtype: torch.dtype
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of what a weight in tiles consists of, by the names of its parts."""
    groups = in_features // precision.effective_group(in_features)
    parts: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "tiles": (torch.uint8, (out_features * in_features * precision.bits // 8,)),
        "scales": (dtype, (groups, out_features)),
    }
    return parts if precision.symmetric else parts | {"zeros": (dtype, (groups, out_features))}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TiledWeight:
    """A weight ``[N, K]`` in tiles, with the codes of a ``PackedWeight``.

    Attributes:
        out_features: N.
        in_features: K.
        precision: bits, group size and symmetry.
        tiles: uint8 ``[N K b / 8]``, row blocks outermost.
        scales: ``[G, N]`` in the run's dtype.
        zeros: ``[G, N]``; ``None`` exactly when the precision is symmetric.
    """

    out_features: int
    in_features: int
    precision: Precision
    tiles: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    @classmethod
    def empty(
        cls, out_features: int, in_features: int, precision: Precision, dtype: torch.dtype
    ) -> TiledWeight:
        """Return a weight whose content is undefined until all its rows were put in."""
        shapes = tiled_shapes(out_features, in_features, precision, dtype)
        parts = {name: torch.empty(shape, dtype=kind) for name, (kind, shape) in shapes.items()}
        return cls(out_features=out_features, in_features=in_features, precision=precision, **parts)

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors by the names of :func:`tiled_shapes`."""
        parts = {"tiles": self.tiles, "scales": self.scales}
        return parts if self.zeros is None else parts | {"zeros": self.zeros}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the scales: that of the run the weight was quantized for."""
        return self.scales.dtype

    @property
    def group_size(self) -> int:
        """Inputs that share one scale."""
        return self.precision.effective_group(self.in_features)

    def put_rows(self, first_row: int, block: PackedWeight) -> None:
        """Fill the tiles of rows ``[first_row, first_row + R)``; needs the compiled library.

        Args:
            first_row: a multiple of ``TILE_ROWS``, as R is.
            block: those rows.
        """
        rows = block.out_features
        assert first_row % TILE_ROWS == rows % TILE_ROWS == 0
        codes = block.codes.contiguous()
        row_bytes = codes.numel() // rows
        part = self.tiles[first_row * row_bytes : (first_row + rows) * row_bytes]
        _kernels().kernels_pack(
            codes.data_ptr(),
            part.data_ptr(),
            rows,
            self.in_features,
            self.precision.bits,
            torch.get_num_threads(),
        )
        self.scales[:, first_row : first_row + rows] = block.scales.t()
        if self.zeros is not None:
            assert block.zeros is not None
            self.zeros[:, first_row : first_row + rows] = block.zeros.t()


def to_tiles(packed: PackedWeight) -> TiledWeight:
    """Return ``packed`` in tiles; needs the compiled library and a shape that ``fits_tiles``."""
    shape = (packed.out_features, packed.in_features)
    weight = TiledWeight.empty(*shape, packed.precision, packed.dtype)
    weight.put_rows(0, packed)
    return weight


def prepared_tiles(weight: TiledWeight, backend: str) -> PreparedWeight:
    """Return a weight in tiles as kernels read it; shares its tensors."""
    handle = Weight(
        tiles=weight.tiles.data_ptr(),
        scales=weight.scales.data_ptr(),
        zeros=None if weight.zeros is None else weight.zeros.data_ptr(),
        rows=weight.out_features,
        columns=weight.in_features,
        group=weight.group_size,
        bits=weight.precision.bits,
        scale_type=TYPES[weight.dtype],
    )
    return PreparedWeight(
        backend=backend,
        out_features=weight.out_features,
        in_features=weight.in_features,
        precision=weight.precision,
        tensors=tuple(weight.parts.values()),
        handle=handle,
    )


def rows_of_tiles(weight: PreparedWeight, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows ``ids`` of a weight in tiles or panels: ``[..., K]`` in ``dtype``.

    Raises:
        IndexError: a row does not exist.
    """
    assert isinstance(weight.handle, Weight)
    ids = ids.contiguous()
    out = torch.empty((*ids.shape, weight.in_features), dtype=dtype)
    count = ids.numel()
    threads = max(1, min(torch.get_num_threads(), count // ROWS_OF_THREAD))
    call = (ids.data_ptr(), out.data_ptr(), count, TYPES[dtype], threads)
    if _kernels().kernels_rows(byref(weight.handle), *call) != DONE:
        raise IndexError(f"found row {int(ids.max())}, expected one of [0, {weight.out_features})")
    return out


def float_product(
    x: Tensor, weight: PreparedWeight, bias: Tensor | None, threads: int | None = None
) -> Tensor:
    """Return ``x @ weight.T + bias`` in float32 arithmetic, rounded once to x's dtype.

    Args:
        x: ``[..., K]``.
        weight: in tiles or panels.
        bias: ``[N]``.
        threads: threads to use, torch's by default.
    """
    return _multiply(_kernels().kernels_float, x, weight, bias, TYPES[x.dtype], threads=threads)


def bf16_product(
    x: Tensor,
    weight: PreparedWeight,
    bias: Tensor | None,
    few_limit: int,
    *,
    in_float: bool = False,
    threads: int | None = None,
) -> Tensor:
    """Return ``x @ weight.T + bias`` for bf16 ``x``; needs the newest instruction set.

    Args:
        x: ``[..., K]``.
        weight: in tiles.
        bias: ``[N]``.
        few_limit: up to so many rows are multiplied while the codes are decoded.
        in_float: whether more rows are multiplied as float32.
        threads: threads to use, torch's by default.
    """
    kernel = _kernels().kernels_bf16
    return _multiply(kernel, x, weight, bias, few_limit, threads=threads, in_float=in_float)


def int8_product(
    x: Tensor,
    weight: PreparedWeight,
    bias: Tensor | None,
    threshold: float,
    threads: int | None = None,
) -> Tensor:
    """Return ``x @ weight.T + bias`` with x rounded to 8 bits a row below ``threshold``.

    The weight has one scale a channel and no zeros. All instruction sets give the same bits
    (``csrc/int8.c``); the baseline has no such kernel.
    """
    options = (threshold, TYPES[x.dtype])
    return _multiply(_kernels().kernels_int8, x, weight, bias, *options, threads=threads)


def packed_int8_product(
    x: Tensor, weight: PreparedWeight, bias: Tensor | None, threads: int | None = None
) -> Tensor:
    """Return ``x @ weight.T + bias`` with ``x`` rounded to 8 bits in blocks of a row.

    A block has up to 128 columns and a scale of its own. The weight has 3 or 4 bits. All
    instruction sets give the same bits (``csrc/packed_int8.c``); the baseline has no such kernel.
    """
    kernel = _kernels().kernels_packed_int8
    return _multiply(kernel, x, weight, bias, TYPES[x.dtype], threads=threads)


def to_panels(
    weight: Tensor, panel_rows: int, multiple: int, *, reuse: bool = False
) -> tuple[Tensor, Weight]:
    """Return a 16-bit weight ``[N, K]`` in panels ``[N', K]``, and its handle.

    Args:
        weight: bf16 or float16, contiguous.
        panel_rows: of a panel.
        multiple: of rows to which N is filled up with zeros, N'; a multiple of ``panel_rows``.
        reuse: whether the memory of ``weight`` may become the panels', which it does if N' is N.
    """
    rows, columns = weight.shape
    missing = -rows % multiple
    panels = weight if reuse and not missing else weight.new_empty(rows + missing, columns)
    handle = Weight(
        tiles=panels.data_ptr(),
        rows=rows,
        columns=columns,
        group=columns,
        bits=16,
        scale_type=TYPES[weight.dtype],
        panel=panel_rows,
    )
    threads = torch.get_num_threads()
    if _kernels().kernels_order(byref(handle), weight.data_ptr(), threads) != DONE:
        raise MemoryError(f"found no memory for {panel_rows} rows of {columns} numbers")
    panels[rows + -rows % panel_rows :].zero_()  # whole panels are missing
    return panels, handle


def dense_product(
    x: Tensor, weight: PreparedWeight, bias: Tensor | None, threads: int | None = None
) -> Tensor:
    """Return ``x @ weight.T + bias`` for bf16 ``x``; the panels have 32 or 64 rows."""
    return _multiply(_kernels().kernels_dense, x, weight, bias, threads=threads)


def _multiply(
    kernel: Callable[..., int],
    x: Tensor,
    weight: PreparedWeight,
    bias: Tensor | None,
    *options: float,
    threads: int | None = None,
    in_float: bool = False,
) -> Tensor:
    x = x.contiguous()
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    y = torch.empty((*x.shape[:-1], weight.out_features), dtype=x.dtype)
    if not x.numel():
        return y
    assert isinstance(weight.handle, Weight)
    assert x.shape[-1] == weight.in_features
    product = Product(
        addressof(weight.handle),
        x.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        x.numel() // weight.in_features,
        threads or torch.get_num_threads(),
        in_float,
    )
    if kernel(byref(product), *options) != DONE:
        raise MemoryError(f"found no memory for the temporaries of {x.shape[:-1].numel()} rows")
    return y


def _kernels() -> CDLL:
    loaded = library()
    assert loaded is not None, "a compiled backend was used without the compiled library"
    return loaded
