"""The compiled CPU kernels called through ctypes: addresses in, a status out.

Plain C in ``csrc/``, compiled on first use in seconds. It is not a torch extension, which needs
C++, torch's headers, half a minute, and a build for every torch. The kernels share torch's thread
pool: torch loads its OpenMP runtime into the process's global scope, where ``csrc/parts.c`` finds
it.

One library holds the kernels for one instruction set, named by the newest extensions it may use:

* ``amx``: all kernels; on AMX's tiles attention of prompts in bf16, products by bf16 weights, and
  those of many rows by 3-, 4- and 8-bit ones;
* ``avx512_bf16``: all kernels without AMX: products of bf16 pairs, dense ones too;
* ``avx512_vnni``, ``avx512``, ``avx2_vnni``, ``avx2``: the float32 kernel, those of 8-bit
  activations, attention and whole decode steps;
* ``baseline``: the float32 kernel and attention.

The choice follows the vector extensions that torch uses in this process, so a process limited to
older ones (``llmpq.dist.launch.process_environment``) gets the older library.

Weights of 3, 4 and 8 bits use tiles, which are the same on every machine and can be filled a block
of rows at a time; 16 bits use panels (both: ``csrc/kernels.h``). Codes take as many bytes as in a
``PackedWeight``; scales and zeros are transposed and keep their dtype.

Shape legend: N output features, K input features, G groups of a row, b bits, R rows of a block.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import (
    CDLL,
    POINTER,
    Structure,
    addressof,
    byref,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_void_p,
)
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from llmpq.kernels.base import PackedWeight, PreparedWeight
from llmpq.native_build import NotCompiledError, library_path
from llmpq.spec.precision import Precision

ABI = 25
DONE = 0

_COMMON = ("-std=gnu11", "-O3", "-Wno-psabi", "-fPIC", "-shared")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_BF16 = (*_COMMON, *_AVX512, "-mavx512vnni", "-mavx512bf16")
FLAGS: dict[str, tuple[str, ...]] = {
    "amx": (*_BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    "avx512_bf16": _BF16,
    "avx512_vnni": (*_COMMON, *_AVX512, "-mavx512vnni"),
    "avx512": (*_COMMON, *_AVX512),
    "avx2_vnni": (*_COMMON, *_AVX2, "-mavxvnni"),
    "avx2": (*_COMMON, *_AVX2),
    "baseline": _COMMON,
}
"""Compiler flags by instruction set; the newest first."""

WITH_BF16 = ("amx", "avx512_bf16")
"""Instruction sets that multiply bf16 pairs, in 512-bit registers."""
WITH_VNNI = (*WITH_BF16, "avx512_vnni", "avx2_vnni")
"""Those that multiply bytes; others multiply 8-bit weights by activations stored as int16."""
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Numbers of the element types in ``csrc/kernels.h``."""


class Weight(Structure):
    """A weight in tiles or in panels (``csrc/kernels.h``)."""

    _fields_ = (
        *((name, c_void_p) for name in ("tiles", "scales", "zeros")),
        *((name, c_int64) for name in ("rows", "columns", "group")),
        *((name, c_int32) for name in ("bits", "scale_type", "panel")),
    )


class Product(Structure):
    """One call (``csrc/kernels.h``)."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "x", "bias", "y")),
        ("count", c_int64),
        *((name, c_int32) for name in ("threads", "in_float")),
    )


class AttentionCall(Structure):
    """One call of attention on blocks (``csrc/step.h``)."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "out", "new_key", "new_value", "keys", "values")),
        *((name, c_void_p) for name in ("key_scales", "value_scales", "tables")),
        *((name, c_void_p) for name in ("starts", "lengths", "chosen", "runs")),
        *((name, c_int64) for name in ("count", "run_count", "kv_heads", "group", "dim")),
        ("block_bits", c_int64),
        *((name, c_int64) for name in ("query_token", "query_head", "key_token", "key_head")),
        *((name, c_int64) for name in ("value_token", "value_head", "block_stride", "head_stride")),
        *((name, c_int64) for name in ("window", "chunk")),
        ("bias", c_void_p),
        ("bias_head", c_int64),
        ("sinks", c_void_p),
        *((name, c_float) for name in ("scaling", "softcap")),
        *((name, c_int32) for name in ("type", "stored", "threads", "stores")),
    )


class Norm(Structure):
    """One call of a norm (``csrc/step.h``)."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight", "bias", "y")),
        *((name, c_int64) for name in ("rows", "columns")),
        ("epsilon", c_float),
        *((name, c_int32) for name in ("type", "weight_type", "centers", "rounds", "threads")),
    )


class Rounding(Structure):
    """One matrix to be rounded (``csrc/round.c``)."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "codes", "scales", "zeros")),
        *((name, c_int64) for name in ("rows", "columns", "group")),
        *((name, c_int32) for name in ("bits", "type", "scale_type", "threads")),
    )


def instruction_set() -> str:
    """Return the newest key of ``FLAGS`` that torch may use in this process."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        if has_bf16_products():
            return "amx" if has_amx() else "avx512_bf16"
        return "avx512_vnni" if has_byte_products() else "avx512"
    if capability.startswith("AVX2"):
        return "avx2_vnni" if has_avx_vnni() and has_u8_matmul() else "avx2"
    return "baseline"


@cache
def has_bf16_products() -> bool:
    """Return whether this process may multiply bf16 pairs and bytes in 512-bit registers."""
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return supported is not None and bool(supported()) and has_byte_products()


@cache
def has_amx() -> bool:
    """Return whether this process may multiply on AMX's tiles, and has a library that does.

    The system is asked for permission; a compiler from before AMX counts as a processor without.
    """
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    ask = getattr(torch.cpu, "_init_amx", None)
    if capabilities is None or ask is None:
        return False
    found = capabilities()
    if not (found.get("amx_int8") and found.get("amx_bf16") and ask()):
        return False
    try:
        load("amx")
    except NotCompiledError:
        return False
    return True


@cache
def has_byte_products() -> bool:
    """Return whether this process may multiply bytes in 512-bit registers (AVX512-VNNI)."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512") and has_u8_matmul()


@cache
def has_avx_vnni() -> bool:
    """Return whether the processor multiplies bytes in 256-bit registers (AVX-VNNI).

    A torch that cannot tell counts as a processor without.
    """
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    return capabilities is not None and bool(capabilities().get("avx_vnni"))


def has_int8(name: str) -> bool:
    """Return whether an instruction set's library multiplies activations of 8 bits.

    These are ``csrc/packed_int8.c`` and ``csrc/int8.c``.
    """
    return name != "baseline"


@cache
def has_u8_matmul() -> bool:
    """Return whether this process multiplies u8 by s8 exactly, by trying the worst case once.

    A worker may be limited to older vector extensions than the processor has, and without VNNI
    oneDNN saturates pairs of products (an all-positive row loses 96 percent).
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    codes = torch.full((64, 64), 127, dtype=torch.int8)  # [N, K]
    rows = torch.full((1, 64), 255, dtype=torch.uint8)  # [M, K]
    y = u8_matmul(rows, torch.ops.onednn.qlinear_prepack(codes, None), torch.ones(64))
    return bool((y == (255 - 128) * 127 * 64).all())


def u8_matmul(rows: Tensor, layout: Tensor, scales: Tensor) -> Tensor:
    """Return ``(rows - 128) @ codes.T * scales`` by oneDNN: uint8 ``[M, K]`` to float32 ``[M, N]``.

    ``layout`` is what ``onednn::qlinear_prepack`` made of the codes ``[N, K]``.
    """
    zero_points = torch.zeros(1, dtype=torch.int32)
    y: Tensor = torch.ops.onednn.qlinear_pointwise(
        rows, 1.0, 128, layout, scales, zero_points, None,
        1.0, 0, torch.float32, "none", [], "",
    )  # fmt: skip
    return y


def has_steps(name: str) -> bool:
    """Return whether an instruction set's library runs whole decode steps (``csrc/step.c``)."""
    return name != "baseline"


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels for this process, or ``None`` where nothing can compile them."""
    try:
        return load(instruction_set())
    except NotCompiledError:
        return None


@cache
def load(name: str) -> ctypes.CDLL:
    """Load the kernels of one instruction set, compiling them when needed.

    Raises:
        NotCompiledError: there are none, and no compiler.
    """
    path = kernels_path(name)
    loaded = ctypes.CDLL(str(path))
    if loaded.kernels_abi() != ABI:
        raise NotCompiledError(f"{path}: found another version of the kernels, expected {ABI}")
    loaded.kernels_pack.restype = None
    loaded.kernels_pack.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_int32, c_int32)
    loaded.kernels_rows.argtypes = (
        POINTER(Weight), c_void_p, c_void_p, c_int64, c_int32, c_int32
    )  # fmt: skip
    loaded.kernels_order.argtypes = (POINTER(Weight), c_void_p, c_int32)
    loaded.kernels_float.argtypes = (POINTER(Product), c_int32)
    loaded.kernels_round.argtypes = (POINTER(Rounding),)
    for name_of_mixer in ("convolution", "delta", "mamba", "scan"):
        mixer = getattr(loaded, f"kernels_{name_of_mixer}")
        mixer.restype = None
        mixer.argtypes = (c_void_p,)
    loaded.kernels_norm.restype = None
    loaded.kernels_norm.argtypes = (POINTER(Norm),)
    for function in (loaded.kernels_attend, loaded.kernels_store):
        function.restype = None
        function.argtypes = (POINTER(AttentionCall),)
    if has_steps(name):
        loaded.kernels_step.restype = None
        loaded.kernels_step.argtypes = (c_void_p,)
        loaded.kernels_experts_open.restype = c_void_p
        loaded.kernels_experts_open.argtypes = (c_void_p, c_int32)
        loaded.kernels_experts_submit.argtypes = (*(c_void_p,) * 6, c_int64)
        for function in (loaded.kernels_experts_wait, loaded.kernels_experts_busy):
            function.restype = None
        loaded.kernels_experts_wait.argtypes = (c_void_p, c_int32)
        loaded.kernels_experts_busy.argtypes = (c_void_p, POINTER(c_double), POINTER(c_int64))
        loaded.kernels_experts_close.restype = None
        loaded.kernels_experts_close.argtypes = (c_void_p,)
    if has_int8(name):
        loaded.kernels_packed_int8.argtypes = (POINTER(Product), c_int32)
        loaded.kernels_int8.argtypes = (POINTER(Product), c_float, c_int32)
    if name in WITH_BF16:
        loaded.kernels_bf16.argtypes = (POINTER(Product), c_int64)
        loaded.kernels_dense.argtypes = (POINTER(Product),)
    return loaded


def kernels_path(name: str) -> Path:
    """Return the library file of one instruction set; see ``load``."""
    package = Path(__file__).parent
    return library_path(package, f"kernels-{name}", FLAGS[name], f"_kernels-{name}.*so")


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
    handle = panel_handle(panels, rows, panel_rows)
    threads = torch.get_num_threads()
    if _kernels().kernels_order(byref(handle), weight.data_ptr(), threads) != DONE:
        raise MemoryError(f"found no memory for {panel_rows} rows of {columns} numbers")
    panels[rows + -rows % panel_rows :].zero_()  # whole panels are missing
    return panels, handle


def panel_handle(panels: Tensor, rows: int, panel_rows: int) -> Weight:
    """Return the handle of a 16-bit weight of ``rows`` rows in panels ``[N', K]``."""
    columns = panels.shape[1]
    return Weight(
        tiles=panels.data_ptr(),
        rows=rows,
        columns=columns,
        group=columns,
        bits=16,
        scale_type=TYPES[panels.dtype],
        panel=panel_rows,
    )


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
