"""The environment variables of workers, their cores, and the malloc settings of a CPU worker.

Thread counts, spinning and vector extensions are read when the libraries load, so a worker is a
process started with these variables.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Mapping
from pathlib import Path

import llmpq
from llmpq.logging import get_logger
from llmpq.spec.cluster import CPU_ISAS
from llmpq.spec.runtime_constants import MAPPED_FROM_BYTES
from llmpq.units import KIB

ISA_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
_ISA_LIMITS = {
    "sse4": ("default", "SSE41", "SSE4_2"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512"),
}
_ISA_FLAGS = {"sse4": "sse4_1", "avx2": "avx2", "avx512": "avx512f"}

_MALLOC_TUNABLES = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
"""glibc cuts torch's blocks from larger ones. Its caches of small blocks keep the cut ends, so that
the hole of a freed tensor is too small for the next one of its size, and the heap grows."""

_SPINS = "6000"
"""Turns, some 0.2 ms, that an OpenMP thread waits awake for its next share of a step: sleeping and
waking takes longer than a small product."""

# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

LOADING_MMAP_BYTES = 256 * KIB
_NEVER = 2**31 - 1
_log = get_logger(__name__)


def pin(pid: int, cores: Collection[int]) -> None:
    """Keep a process on these cores where the host allows it.

    A container may forbid the call, and its cores may change while the process starts; it is
    slower then, not wrong.
    """
    try:
        os.sched_setaffinity(pid, cores)
    except ProcessLookupError:
        pass  # its end is noticed elsewhere
    except OSError as error:
        _log.warning("process %d is not kept on cores of its own: %s", pid, error.strerror)


def cpu_environment(
    threads: int, cpu_isa: str | None = None, *, has_own_cores: bool = True
) -> dict[str, str]:
    """Return the variables for a CPU worker.

    Args:
        threads: it computes with.
        cpu_isa: newest vector extension it may use (``spec.cluster.CPU_ISAS``), ``None`` for all.
        has_own_cores: whether no other worker computes on the cores of its threads.
    """
    count = str(threads)
    variables = {
        # A thread that spins for long takes the core that another worker computes on.
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "TOKENIZERS_PARALLELISM": "false",
        # oneDNN keeps a compiled kernel of 0.3 MB for every number of rows, by default up to 1024.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
        "GLIBC_TUNABLES": _MALLOC_TUNABLES,
    }
    if threads > 1 and has_own_cores:
        variables["GOMP_SPINCOUNT"] = _SPINS
    return variables | isa_environment(cpu_isa)


def isa_environment(cpu_isa: str | None) -> dict[str, str]:
    """Return the variables that hold a process and its children to a vector extension.

    They reach torch, oneDNN, MKL, and through torch the kernels of this package. ``None`` sets
    none; a process that sets all of ``ISA_VARIABLES`` or none of them has one limit for all.
    torch uses what its variable says, also on a processor without it: a limit that is newer than
    the processor, or than this process's own limit, becomes theirs.
    """
    if cpu_isa is None:
        return {}
    newest = CPU_ISAS.index(cpu_isa)
    usable = [isa for isa in usable_isas(os.environ) if CPU_ISAS.index(isa) <= newest]
    return dict(zip(ISA_VARIABLES, _ISA_LIMITS[usable[-1]], strict=True)) if usable else {}


def allowed_isa(environ: Mapping[str, str]) -> str | None:
    """Return the newest vector extension that these variables allow, ``None`` for all."""
    limit = environ.get(ISA_VARIABLES[0])
    return next((isa for isa, values in _ISA_LIMITS.items() if values[0] == limit), None)


def usable_isas(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the vector extensions of this processor that the variables allow, oldest first."""
    newest = CPU_ISAS.index(allowed_isa(environ) or CPU_ISAS[-1])
    flags = set(cpuinfo("flags").split())
    return tuple(isa for isa in CPU_ISAS[: newest + 1] if _ISA_FLAGS[isa] in flags)


def cpuinfo(key: str, text: str | None = None) -> str:
    """Return the first value of ``key`` in ``/proc/cpuinfo``, or in ``text``; empty for none."""
    if text is None:
        try:
            text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        except OSError:
            return ""
    values = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for name, _, value in values if name.strip() == key), "")


def cuda_environment(store: Path | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a worker of an NVIDIA GPU; those of ``environ`` are kept.

    ``expandable_segments`` of torch's allocator is not among them: the pool of CUDA graphs is
    bounded by their order, and segments that grow have made runs with captured graphs hang
    (pytorch/torchtitan#3306) and were disabled for graphs for a while (pytorch/pytorch#194767).

    Args:
        store: of quantized layers, ``None`` without one. Triton's compiled kernels go beside it:
            its own folder is in the home directory, which a container loses.
        environ: of this process.
    """
    variables = {
        # cuDNN builds a plan for every new shape; ``open_device`` disables it in the process.
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
    }
    if store is not None:
        variables["TRITON_CACHE_DIR"] = str(store.parent / "triton")
    return {name: environ.get(name, value) for name, value in variables.items()}


def python_path(environ: Mapping[str, str]) -> str:
    """Return ``PYTHONPATH`` for a process that imports this package from where it is now."""
    package_parent = str(Path(llmpq.__file__).resolve().parents[1])
    paths = [package_parent, *environ.get("PYTHONPATH", "").split(os.pathsep)]
    return os.pathsep.join(path for path in paths if path)


def tune_malloc_for_loading() -> None:
    """Return freed memory to the system at once, and share one heap between all threads.

    Matrices and the blocks that a quantizer works on are mapped on their own. In the heap they
    would leave holes, and the tensors of later steps between them more holes, in another order in
    every run: peaks of one plan differed by 20 MB. Does nothing without glibc.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_MMAP_THRESHOLD, LOADING_MMAP_BYTES)


def tune_malloc_for_serving() -> None:
    """Return the memory that loading left, then keep freed memory for the next step.

    With glibc's defaults every step would map its temporaries anew. Does nothing without glibc.
    """
    return_freed_memory()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def resident_bytes() -> int:
    """Return the memory that this process has, 0 where the system (not Linux) does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def return_freed_memory() -> None:
    """Give freed memory back to the operating system. Does nothing without glibc."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
