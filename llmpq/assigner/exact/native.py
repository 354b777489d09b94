"""The compiled core: found or built once, called through ctypes on numpy arrays.

``csrc/`` is plain C11 without dependencies. A wheel may bring it compiled (``_core*.so`` next to
this module); otherwise the first use compiles it, about two seconds, into ``__pycache__`` under a
name that carries the digest of its sources. Without a compiler the search is not covered, and the
caller takes the integer program. It refuses to know what is being planned: arrays in, arrays out.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_double, c_int32, c_int64, c_uint64
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llmpq.assigner.exact.coverage import NotCoveredError

ABI = 3
FLAGS = ("-std=c11", "-D_POSIX_C_SOURCE=200809L", "-O3", "-ffp-contract=off", "-fPIC", "-shared")
COMPILE_LIMIT_S = 60.0
DONE, OVERFLOW, DEADLINE, NO_MEMORY = range(4)

_Doubles = POINTER(c_double)
_Ints = POINTER(c_int32)
_Longs = POINTER(c_int64)
_TYPES = {_Doubles: np.float64, _Ints: np.int32, _Longs: np.int64}
AnyArray = npt.NDArray[np.generic]


class Problem(Structure):
    """One micro-batch pair (``exact.h``)."""

    _fields_ = (
        *((name, c_int32) for name in ("groups", "kinds", "bits", "layers")),
        ("kind", _Ints),
        *((name, _Doubles) for name in ("prefill", "decode")),
        *((name, _Longs) for name in ("bytes", "capacity")),
        *((name, _Doubles) for name in ("master_prefill", "master_decode")),
        *((name, _Doubles) for name in ("send_prefill", "send_decode", "omega")),
        *((name, c_double) for name in ("theta", "budget", "peak_prefill", "peak_decode")),
        ("sum_weight", c_double * 2),
        ("rounds", c_double),
        *((name, c_int32) for name in ("steady", "links_in_sums")),
    )


class Lattice(Structure):
    """The orders of devices as paths (``exact.h``)."""

    _fields_ = (
        *((name, c_int32) for name in ("nodes", "edges")),
        *((name, _Ints) for name in ("node_class", "node_return", "edge_start", "edge_target")),
        ("edge_link", _Ints),
        *((name, _Doubles) for name in ("remaining", "count", "arrivals")),
        ("price_inner_links", c_int32),
    )


class Ascent(Structure):
    """One schedule of the dual ascent (``exact.h``)."""

    _fields_ = (
        *((name, c_int32) for name in ("iterations", "patience", "restart")),
        *((name, c_double) for name in ("step", "shrink", "momentum", "smallest_step")),
    )


class Search(Structure):
    """Limits and answers of one label search (``exact.h``)."""

    _fields_ = (
        *((name, c_double) for name in ("column_limit", "label_limit", "seconds")),
        *((name, c_int64) for name in ("max_columns", "max_labels")),
        ("value", c_double),
        *((name, c_int64) for name in ("columns", "labels", "kept", "states")),
        ("stages", c_int32),
    )


def fill(target: Structure, **values: object) -> list[AnyArray]:
    """Set fields of a structure; arrays become pointers.

    Returns:
        The arrays pointed to, which must outlive the structure.
    """
    kinds = {name: kind for name, kind, *_ in target._fields_}
    held: list[AnyArray] = []
    for name, value in values.items():
        if kinds[name] in _TYPES:
            array = np.ascontiguousarray(value, dtype=_TYPES[kinds[name]])
            held.append(array)
            value = array.ctypes.data_as(kinds[name])
        setattr(target, name, value)
    return held


def doubles(array: npt.NDArray[np.float64]) -> object:
    """Return the C pointer of a contiguous float64 array."""
    return array.ctypes.data_as(_Doubles)


def lattice_bound(
    problem: Problem,
    lattice: Lattice,
    multipliers: npt.NDArray[np.float64],
    schedules: Sequence[Ascent],
    *,
    target: float,
    seconds: float,
) -> float:
    """Improve ``multipliers`` in place and return the bound they prove (infinite: nothing fits)."""
    steps = (Ascent * max(1, len(schedules)))(*schedules)
    return float(
        library().exact_lattice_bound(
            byref(problem),
            byref(lattice),
            doubles(multipliers),
            steps,
            len(schedules),
            target,
            seconds,
        )
    )


def pool_bound(
    problem: Problem,
    lattice: Lattice,
    floor: tuple[npt.NDArray[np.int32], npt.NDArray[np.float64], int],
    multipliers: npt.NDArray[np.float64],
    schedule: Ascent,
) -> float:
    """Return the bound with contiguity dropped.

    Args:
        problem, lattice: the pair, and the numbers of devices.
        floor: ``[T]`` whether a group can hold a layer; ``[2]`` a prefill and a decode send that
            no link undercuts; devices that every plan uses at least.
        multipliers: improved in place.
        schedule: steps of the ascent.
    """
    usable, link, fewest = floor
    return float(
        library().exact_pool_bound(
            byref(problem),
            byref(lattice),
            usable.ctypes.data_as(_Ints),
            doubles(link),
            float(fewest),
            doubles(multipliers),
            byref(schedule),
        )
    )


def relaxed_plan(
    problem: Problem, lattice: Lattice, multipliers: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return the stages ``[n, 3]`` (node, first, end) and widths ``[L]`` that attain a bound."""
    stages = np.zeros((lattice.nodes, 3), dtype=np.int32)
    choice = np.zeros(problem.layers, dtype=np.int32)
    count = library().exact_relaxed_plan(
        byref(problem),
        byref(lattice),
        doubles(multipliers),
        stages.ctypes.data_as(_Ints),
        choice.ctypes.data_as(_Ints),
    )
    return stages[:count], choice


def search(
    problem: Problem, lattice: Lattice, multipliers: npt.NDArray[np.float64], limits: Search
) -> tuple[int, npt.NDArray[np.int32], npt.NDArray[np.uint64]]:
    """Run the label search; ``limits`` also takes its answers.

    Returns:
        Status; stages ``[n, 3]`` (node, first, end) and counts ``[n]``, first stage first.
    """
    stages = np.zeros((lattice.nodes, 3), dtype=np.int32)
    counts = np.zeros(lattice.nodes, dtype=np.uint64)
    status = int(
        library().exact_search(
            byref(problem),
            byref(lattice),
            doubles(multipliers),
            byref(limits),
            stages.ctypes.data_as(_Ints),
            counts.ctypes.data_as(POINTER(c_uint64)),
        )
    )
    return status, stages[: limits.stages][::-1], counts[: limits.stages][::-1]


@cache
def library() -> ctypes.CDLL:
    """Load the compiled core, building it when needed.

    Raises:
        NotCoveredError: there is none, and no compiler to build it.
    """
    here = Path(__file__).parent
    found = sorted(here.glob("_core*.so")) + sorted(here.glob("_core*.pyd"))
    loaded = ctypes.CDLL(str(found[0] if found else _built(here)))
    if loaded.exact_abi() != ABI:
        raise NotCoveredError(f"{found}: found another version of the core, expected {ABI}")
    loaded.exact_lattice_bound.restype = c_double
    loaded.exact_pool_bound.restype = c_double
    loaded.exact_lattice_bound.argtypes = (
        *(POINTER(kind) for kind in (Problem, Lattice)),
        *(_Doubles, POINTER(Ascent), c_int32, c_double, c_double),
    )
    loaded.exact_pool_bound.argtypes = (
        *(POINTER(kind) for kind in (Problem, Lattice)),
        *(_Ints, _Doubles, c_double, _Doubles, POINTER(Ascent)),
    )
    return loaded


def _built(here: Path) -> Path:
    """Compile the core unless a library of these very sources is kept already."""
    sources = sorted((here / "csrc").glob("*.[ch]"))
    digest = hashlib.sha256(repr((FLAGS, sys.platform, sysconfig.get_platform())).encode())
    for source in sources:
        digest.update(source.read_bytes())
    name = f"exact-{digest.hexdigest()[:16]}.so"
    for folder in (here / "__pycache__", Path(tempfile.gettempdir()) / f"llmpq-{os.getuid()}"):
        if _owned(folder) and (folder / name).is_file():
            return folder / name
    for folder in (here / "__pycache__", Path(tempfile.gettempdir()) / f"llmpq-{os.getuid()}"):
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            return _compile([str(item) for item in sources if item.suffix == ".c"], folder / name)
        except OSError:
            continue
    raise NotCoveredError(f"the compiled core cannot be kept in {here} or the temporary folder")


def _owned(folder: Path) -> bool:
    """Whether nobody else can have put a library there."""
    if not folder.is_dir():
        return False
    status = folder.stat()
    return status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022


def _compile(sources: Sequence[str], target: Path) -> Path:
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is None:
        raise NotCoveredError("found no C compiler (cc, gcc or clang), and no compiled core")
    with tempfile.TemporaryDirectory(prefix="exact-", dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [compiler, *FLAGS, *sources, "-o", str(made), "-lm"]
        done = subprocess.run(  # noqa: S603 - fixed flags, our own sources
            command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False
        )
        if done.returncode:
            raise NotCoveredError(f"{compiler} failed on the core: {done.stderr.strip()[-400:]}")
        made.replace(target)
    return target
