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
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from llmpq.native_build import NotCompiledError, library_path

ABI = 20
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
    loaded.kernels_norm.restype = None
    loaded.kernels_norm.argtypes = (POINTER(Norm),)
    for function in (loaded.kernels_attend, loaded.kernels_store):
        function.restype = None
        function.argtypes = (POINTER(AttentionCall),)
    if has_steps(name):
        loaded.kernels_step.restype = None
        loaded.kernels_step.argtypes = (c_void_p,)
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
