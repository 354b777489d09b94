"""The environment of processes: what workers are started with, and what started this process.

Thread counts, spinning, vector extensions and visible accelerators are read when the libraries
load, so a worker is a process started with these variables. Its cores and the malloc settings of a
CPU worker are here, too.

Slurm's ``srun`` and Open MPI's ``mpirun`` start the same command several times and number the
copies, which they call tasks. A single task is an ordinary process. As many tasks as a plan has
nodes start the ranks of one node each; as many as it has stages are one rank each.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import llmpq
from llmpq.errors import SpecError
from llmpq.logging import get_logger
from llmpq.spec import catalog
from llmpq.spec.cluster import CPU_ISAS, Cluster
from llmpq.spec.runtime_constants import MAPPED_FROM_BYTES
from llmpq.units import KIB

LOOPBACK = "127.0.0.1"
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
"""The variable that says which accelerators of a kind a process sees."""
ISA_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
_ISA_LIMITS = {
    "sse4": ("default", "SSE41", "SSE4_2"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512"),
}
_ISA_FLAGS = {"sse4": "sse4_1", "avx2": "avx2", "avx512": "avx512f"}

HOST_CORES = "LLMPQ_HOST_CORES"
"""The variable with the cores of the threads that compute a rank's experts: ``2,3``."""

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


def host_cores(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Return the cores of the threads that compute this rank's experts; none: any."""
    return tuple(int(core) for core in environ.get(HOST_CORES, "").split(",") if core)


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


def visible_devices(
    cluster: Cluster,
    labels: Sequence[str],
    environment: Mapping[str, str],
    node: str | None = None,
) -> dict[str, str]:
    """Return the variables that show a pipeline its own accelerators.

    Accelerators of a kind are numbered in the order of the cluster, among those that
    ``environment`` shows.

    Args:
        cluster: all devices of this host, or of several.
        labels: the pipeline's devices, in the order of its plan's cluster.
        environment: of this process.
        node: which node of the cluster this host is; by default accelerators are on one.

    Raises:
        SpecError: the cluster has accelerators on several nodes, or more than are shown.
    """
    devices = [
        (device.label, device.node, catalog.device(device.type, cluster).kind)
        for device in cluster.devices
        if node in (None, device.node)
    ]
    nodes = {node for _, node, kind in devices if kind != "cpu"}
    if len(nodes) > 1:
        raise SpecError(
            f"cluster {cluster.name}: found accelerators on {', '.join(sorted(nodes))}, expected "
            "one node"
        )
    found = {}
    for kind, variable in VISIBLE.items():
        numbers = {
            label: place
            for place, label in enumerate(label for label, _, own in devices if own == kind)
        }
        if not numbers:
            continue
        shown = environment.get(variable)
        names = [str(i) for i in range(len(numbers))] if shown is None else shown.split(",")
        if len(names) < len(numbers):
            raise SpecError(
                f"{variable}: found {shown}, expected the {len(numbers)} devices of cluster "
                f"{cluster.name}"
            )
        found[variable] = ",".join(names[numbers[label]] for label in labels if label in numbers)
    return found


def cores_of_devices(cluster: Cluster, available: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the cores of every CPU device with a stated number of threads.

    Devices get cores of their own, in the order of the cluster; none do if there are too few, and
    the kernel then shares all cores.

    Args:
        cluster: all devices of this host.
        available: cores that may be used.
    """
    threads = {
        device.label: device.threads or 0
        for device in cluster.devices
        if catalog.device(device.type, cluster).kind == "cpu"
    }
    if sum(threads.values()) > len(available) or 0 in threads.values():
        return {}
    found, first = {}, 0
    for label, count in threads.items():
        found[label] = tuple(available[first : first + count])
        first += count
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One of several tasks of a command.

    Attributes:
        launcher: program that started the tasks.
        rank: number of this task.
        world_size: number of tasks.
        local_rank: number of this task among those of its host.
        local_world_size: number of tasks on its host.
        first_host: host of task 0; ``None`` if the environment does not name it.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    first_host: str | None = None

    def __post_init__(self) -> None:
        is_numbered = 0 <= self.local_rank < self.local_world_size <= self.world_size
        if not is_numbered or not 0 <= self.rank < self.world_size:
            raise SpecError(
                f"environment: found task {self.rank} of {self.world_size}, task {self.local_rank} "
                f"of {self.local_world_size} on its host, expected {self.launcher} to number tasks "
                "from 0"
            )

    @property
    def local_ranks(self) -> range:
        """The tasks of this host, if every host has consecutive ones."""
        first = min(self.rank - self.local_rank, self.world_size - self.local_world_size)
        return range(max(0, first), max(0, first) + self.local_world_size)


def torchrun_task(environ: Mapping[str, str]) -> Task:
    """Return the task of torchrun's environment.

    Raises:
        SpecError: a variable is missing or is no number.
    """
    rank, size, local_rank, local_size = (
        _number(environ, name, "torchrun")
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    return Task(
        launcher="torchrun",
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
    )


def started_task(environ: Mapping[str, str]) -> Task | None:
    """Return the task of ``srun`` or ``mpirun``; ``None`` for a process that is alone.

    Slurm sets the variables of a step only in what ``srun`` starts, and not in a batch script that
    runs the command once.

    Raises:
        SpecError: a variable is missing or is no number.
    """
    if "OMPI_COMM_WORLD_SIZE" in environ:
        task = _open_mpi_task(environ)
    elif "SLURM_STEP_NUM_TASKS" in environ:
        task = _slurm_task(environ)
    else:
        return None
    return None if task.world_size == 1 else task


def _open_mpi_task(environ: Mapping[str, str]) -> Task:
    rank, size, local_rank, local_size = (
        _number(environ, f"OMPI_COMM_WORLD_{name}", "mpirun")
        for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    return Task(
        launcher="mpirun",
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        first_host=LOOPBACK if local_size == size else None,
    )


def _slurm_task(environ: Mapping[str, str]) -> Task:
    size, rank, local_rank, node = (
        _number(environ, name, "srun")
        for name in ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
    )
    counts = tasks_of_nodes(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if node >= len(counts):
        raise SpecError(
            f"environment: SLURM_NODEID: found {node}, expected one of the {len(counts)} nodes of "
            "SLURM_STEP_TASKS_PER_NODE"
        )
    host = first_host(environ.get("SLURM_STEP_NODELIST", ""))
    return Task(
        launcher="srun",
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=counts[node],
        first_host=LOOPBACK if len(counts) == 1 else host,
    )


def tasks_of_nodes(text: str) -> list[int]:
    """Return the tasks of each node from Slurm's short form: ``2(x3),1`` is 2, 2, 2, 1.

    Raises:
        SpecError: the text has another form.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if found is None:
            raise SpecError(
                f"environment: SLURM_STEP_TASKS_PER_NODE: found '{text[:80]}', expected the form "
                "2(x3),1"
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_host(nodes: str) -> str | None:
    """Return the first host of Slurm's short form: ``gpu[03-05,09],login`` gives ``gpu03``."""
    found = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes)
    if found is None:
        return None
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", found[0])


def _number(environ: Mapping[str, str], name: str, launcher: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        raise SpecError(f"environment: {name}: found '{text}', expected {launcher}'s number")
    return int(text)
