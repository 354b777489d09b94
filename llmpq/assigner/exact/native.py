"""The compiled core, called through ctypes: arrays in, arrays out.

The structures mirror ``csrc/exact.h``, which documents every field. A wheel may include the core
compiled (``_core*.so`` next to this module); otherwise the first use compiles ``csrc/``. Without a
compiler the exact search is not available.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_double, c_int32, c_int64
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmpq.errors import SolverError
from llmpq.native_build import NotCompiledError, library_path

FLAGS = ("-std=c11", "-D_POSIX_C_SOURCE=200809L", "-O3", "-ffp-contract=off", "-fPIC", "-shared")
"""Without contraction, so that a plan does not depend on a machine's fused operations."""

ABI = 4
DONE, OVERFLOW, DEADLINE, NO_MEMORY = range(4)

_Doubles = POINTER(c_double)
_Ints = POINTER(c_int32)
_Longs = POINTER(c_int64)
_TYPES = {_Doubles: np.float64, _Ints: np.int32, _Longs: np.int64}
AnyArray = npt.NDArray[np.generic]


class NotCoveredError(SolverError):
    """The exact search does not support a problem; the integer program does.

    Raised before any search: no compiled core and no compiler, too many kinds of layers and
    bitwidths, or too many device orders.
    """


def core_path(here: Path | None = None, limit_s: float = math.inf) -> Path:
    """Return the compiled core; compile it within ``limit_s`` seconds unless it exists.

    Raises:
        NotCoveredError: there is none, and it cannot be compiled or stored.
    """
    try:
        return library_path(here or Path(__file__).parent, "exact", FLAGS, "_core*.so", limit_s)
    except NotCompiledError as error:
        raise NotCoveredError(f"the core of the exact search: {error}") from error


class PairProblem(Structure):
    """One micro-batch pair (``exact.h``)."""

    _fields_ = (
        *((name, c_int32) for name in ("groups", "kinds", "bits", "layers")),
        ("kind", _Ints),
        *((name, _Doubles) for name in ("prefill", "decode")),
        *((name, _Longs) for name in ("bytes", "capacity", "host", "host_capacity")),
        ("streamable", _Longs),
        *((name, _Doubles) for name in ("stream_prefill", "stream_decode", "split")),
        ("buffers", c_int64),
        *((name, _Doubles) for name in ("master_prefill", "master_decode")),
        *((name, _Doubles) for name in ("send_prefill", "send_decode", "omega")),
        ("allowed", _Ints),
        *((name, c_double) for name in ("theta", "budget", "peak_prefill", "peak_decode")),
        ("sum_weight", c_double * 2),
        ("rounds", c_double),
        *((name, c_int32) for name in ("steady", "links_in_sums")),
    )


class Lattice(Structure):
    """The device orders as paths (``exact.h``)."""

    _fields_ = (
        *((name, c_int32) for name in ("nodes", "edges")),
        *((name, _Ints) for name in ("node_class", "node_return", "node_final", "least_layers")),
        *((name, _Ints) for name in ("edge_start", "edge_target", "edge_link")),
        *((name, _Doubles) for name in ("remaining", "count", "arrivals")),
        ("price_inner_links", c_int32),
    )


class Ascent(Structure):
    """One schedule of the dual ascent (``exact.h``)."""

    _fields_ = (
        *((name, c_int32) for name in ("iterations", "patience", "restart")),
        *((name, c_double) for name in ("step", "shrink", "momentum", "smallest_step")),
    )


class LabelSearch(Structure):
    """Limits and results of one label search (``exact.h``)."""

    _fields_ = (
        *((name, c_double) for name in ("limit", "seconds", "beam_limit")),
        *((name, c_int64) for name in ("max_columns", "max_labels", "pass_labels")),
        *((name, c_int32) for name in ("beam", "stages")),
        *((name, c_double) for name in ("value", "bound")),
        *((name, c_int64) for name in ("columns", "labels", "kept", "states")),
    )


def fill(target: Structure, **values: object) -> list[AnyArray]:
    """Set fields of a structure, arrays as pointers; return the arrays, which must outlive it."""
    kinds: dict[str, Any] = {name: kind for name, kind, *_ in target._fields_}
    held: list[AnyArray] = []
    for name, value in values.items():
        kind = kinds[name]
        if kind not in _TYPES:
            setattr(target, name, value)
            continue
        held.append(np.ascontiguousarray(value, dtype=_TYPES[kind]))
        setattr(target, name, held[-1].ctypes.data_as(kind))
    return held


def lattice_bound(
    problem: PairProblem,
    lattice: Lattice,
    multipliers: npt.NDArray[np.float64],
    schedules: Sequence[Ascent],
    *,
    target: float,
    seconds: float,
) -> float:
    """Improve ``multipliers`` in place; return the bound they prove, infinite when no plan fits.

    Stops at ``target`` or after ``seconds``. Without schedules the multipliers are only evaluated.
    """
    steps, count = (Ascent * max(1, len(schedules)))(*schedules), len(schedules)
    bound = library().exact_lattice_bound
    return float(bound(problem, lattice, multipliers, steps, count, target, seconds))


def noncontiguous_bound(
    problem: PairProblem,
    lattice: Lattice,
    floor: tuple[npt.NDArray[np.int32], npt.NDArray[np.float64], int],
    multipliers: npt.NDArray[np.float64],
    schedule: Ascent,
) -> float:
    """Improve ``multipliers`` in place; return the bound they prove without contiguity.

    ``floor`` is ``[T]`` whether a group can hold a layer; ``[2]`` the least prefill and decode
    seconds of any link; the least number of devices of any plan.
    """
    bound = library().exact_noncontiguous_bound
    return float(bound(problem, lattice, *floor, multipliers, schedule))


def relaxed_plan(
    problem: PairProblem, lattice: Lattice, multipliers: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return the stages ``[n, 3]`` (node, first, end) and widths ``[L]`` that attain a bound."""
    stages = np.zeros((lattice.nodes, 3), dtype=np.int32)
    choice = np.zeros(problem.layers, dtype=np.int32)
    count = library().exact_relaxed_plan(problem, lattice, multipliers, stages, choice)
    return stages[:count], choice


def search(
    problem: PairProblem,
    lattice: Lattice,
    multipliers: npt.NDArray[np.float64],
    limits: LabelSearch,
) -> tuple[int, npt.NDArray[np.int32], npt.NDArray[np.uint64]]:
    """Run the label search, with results in ``limits``.

    Returns the status, stages ``[n, 3]`` (node, first, end) and counts ``[n]``, first stage first.
    """
    stages = np.zeros((lattice.nodes, 3), dtype=np.int32)
    counts = np.zeros(lattice.nodes, dtype=np.uint64)
    status = library().exact_search(problem, lattice, multipliers, limits, stages, counts)
    return int(status), stages[: limits.stages][::-1], counts[: limits.stages][::-1]


def prepare(left_s: float) -> None:
    """Load the compiled core; raises ``NotCoveredError`` if the time is too short to compile it."""
    core_path(limit_s=left_s)
    library()


@cache
def library() -> ctypes.CDLL:
    """Load the compiled core, compiling it when needed; raises as ``core_path`` does."""
    path = core_path()
    loaded = ctypes.CDLL(str(path))
    if loaded.exact_abi() != ABI:
        found = loaded.exact_abi()
        raise NotCoveredError(f"{path}: found version {found} of the core, expected {ABI}")
    pair = POINTER(PairProblem), POINTER(Lattice)
    doubles, ints, counts = (
        np.ctypeslib.ndpointer(dtype, flags="C") for dtype in (np.float64, np.int32, np.uint64)
    )
    ascent = POINTER(Ascent)
    bound, relaxed = loaded.exact_lattice_bound, loaded.exact_noncontiguous_bound
    bound.restype = relaxed.restype = c_double
    bound.argtypes = (*pair, doubles, ascent, c_int32, c_double, c_double)
    relaxed.argtypes = (*pair, ints, doubles, c_double, doubles, ascent)
    loaded.exact_relaxed_plan.argtypes = (*pair, doubles, ints, ints)
    loaded.exact_search.argtypes = (*pair, doubles, POINTER(LabelSearch), ints, counts)
    return loaded
