"""The environment a CPU worker must have before torch is imported in it.

Thread counts, spinning and vector extensions are read once, when the libraries load; set later they
are ignored. So a worker is always a process that was started with these.
"""

from __future__ import annotations

# One extension, three libraries: ATen's own kernels, oneDNN's products, MKL's products.
_ISA_LIMITS: dict[str, dict[str, str]] = {
    "sse4": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "avx512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
}

_WHOLE_HOLES = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
"""torch asks for blocks at multiples of 64 bytes, and glibc cuts each from one 96 bytes larger. It
keeps the cut ends for small blocks (a thread's cache, fast bins), so that the hole of a freed
tensor is too small for the next of its size, and the heap grows. Given back at once, ends join the
hole again. Replaces whatever tunables the launching process has."""

_SPINS = "2000"
"""Turns, some 0.1 ms, that an OpenMP thread waits awake for its next share of a step. To sleep and
be woken costs more than a small product: 31 steps of one sequence take 0.49 s without and 0.35 s
with them (125 M parameters at 16 bits, two threads)."""


def cpu_environment(
    threads: int, cpu_isa: str | None = None, *, has_own_cores: bool = True
) -> dict[str, str]:
    """Return the variables for a CPU worker.

    Args:
        threads: threads it may compute with.
        cpu_isa: newest vector extension it may use (``spec.cluster.CPU_ISAS``), ``None`` for all.
        has_own_cores: whether nobody else computes on the cores of its threads.
    """
    count = str(threads)
    variables = {
        # A thread that spins for long takes the core that another worker computes on.
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "TOKENIZERS_PARALLELISM": "false",
        # oneDNN keeps a compiled kernel of 0.3 MB for every number of rows it has met: given
        # prompts of all lengths, it would keep 1024.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
        "GLIBC_TUNABLES": _WHOLE_HOLES,
    }
    if threads > 1 and has_own_cores:
        variables["GOMP_SPINCOUNT"] = _SPINS
    if cpu_isa is not None:
        variables.update(_ISA_LIMITS[cpu_isa])
    return variables
