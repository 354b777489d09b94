"""Weights in the layouts of the compiled kernels, and their products.

3, 4 and 8 bits use tiles (``csrc/kernels.h``), bf16 uses panels (``csrc/dense_bf16.c``). Codes take
as many bytes as in a ``PackedWeight``; scales and zeros are transposed and keep their dtype.

Shape legend: N output features, K input features, G groups of a row, b bits.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL, addressof, byref

import torch
from torch import Tensor

from llmpq.kernels.base import PreparedWeight
from llmpq.kernels.cpu.native import DONE, TYPES, Product, Weight, library
from llmpq.kernels.cpu.tiled import TiledWeight
from llmpq.kernels.packed import PackedWeight


def to_tiles(packed: PackedWeight, backend: str) -> PreparedWeight:
    """Return ``packed`` in tiles ``[N K b / 8]``, with scales and zeros ``[G, N]``.

    Needs the compiled library and a shape that ``fits_tiles``.
    """
    shape = (packed.out_features, packed.in_features)
    tiled = TiledWeight.empty(*shape, packed.precision, packed.dtype)
    tiled.put_rows(0, packed)
    return prepared_tiles(tiled, backend)


def prepared_tiles(tiled: TiledWeight, backend: str) -> PreparedWeight:
    """Return a weight in tiles as kernels read it; shares its tensors."""
    weight = Weight(
        tiles=tiled.tiles.data_ptr(),
        scales=tiled.scales.data_ptr(),
        zeros=None if tiled.zeros is None else tiled.zeros.data_ptr(),
        rows=tiled.out_features,
        columns=tiled.in_features,
        group=tiled.group_size,
        bits=tiled.precision.bits,
        scale_type=TYPES[tiled.dtype],
    )
    return PreparedWeight(
        backend=backend,
        out_features=tiled.out_features,
        in_features=tiled.in_features,
        precision=tiled.precision,
        tensors=tuple(tiled.parts.values()),
        handle=weight,
    )


def float_product(x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
    """Return ``x @ weight.T + bias`` in float32 arithmetic, ``[..., N]`` in x's dtype."""
    wide = None if bias is None else bias.to(torch.float32)
    return _multiply(_kernels().kernels_float, x.to(torch.float32), weight, wide).to(x.dtype)


def bf16_product(
    x: Tensor,
    weight: PreparedWeight,
    bias: Tensor | None,
    few_limit: int,
    threads: int | None = None,
) -> Tensor:
    """Return ``x @ weight.T + bias`` for bf16 ``x``; needs the newest instruction set.

    Args:
        x: ``[..., K]``.
        weight: in tiles.
        bias: ``[N]``.
        few_limit: up to so many rows are multiplied while the codes are decoded.
        threads: threads to use, torch's by default.
    """
    return _multiply(_kernels().kernels_bf16, x, weight, bias, few_limit, threads=threads)


def int8_product(
    x: Tensor, weight: PreparedWeight, bias: Tensor | None, threshold: float
) -> Tensor:
    """Return ``x @ weight.T + bias`` with x rounded to 8 bits a row below ``threshold``.

    ``x`` is float32 or bf16; the weight has one scale a channel and no zeros.
    """
    return _multiply(_kernels().kernels_int8, x, weight, bias, threshold, TYPES[x.dtype])


def panels_of(layout: int, weight: Tensor) -> Weight | None:
    """Return the handle of panels at the address ``layout``, if they hold bf16 ``weight``.

    Compares every number. ``weight`` ``[N, K]`` is contiguous, N a multiple of 64 and K of 32.
    """
    rows, columns = weight.shape
    handle = Weight(tiles=layout, rows=rows, columns=columns, group=columns, bits=16)
    threads = torch.get_num_threads()
    holds = _kernels().kernels_dense_holds(byref(handle), weight.data_ptr(), threads)
    return handle if holds else None


def dense_product(
    x: Tensor, weight: PreparedWeight, bias: Tensor | None, threads: int | None = None
) -> Tensor:
    """Return ``x @ weight.T + bias`` for bf16 ``x`` and a bf16 weight in panels."""
    return _multiply(_kernels().kernels_dense, x, weight, bias, threads=threads)


def _multiply(
    kernel: Callable[..., int],
    x: Tensor,
    weight: PreparedWeight,
    bias: Tensor | None,
    *options: float,
    threads: int | None = None,
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
    )
    if kernel(byref(product), *options) != DONE:
        raise MemoryError(f"found no memory for the temporaries of {x.shape[:-1].numel()} rows")
    return y


def _kernels() -> CDLL:
    loaded = library()
    assert loaded is not None, "a compiled backend was used without the compiled library"
    return loaded
