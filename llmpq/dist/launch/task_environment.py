"""Ranks and hosts from the environment of the program that started this process.

Slurm's ``srun`` and Open MPI's ``mpirun`` start the same command several times and number the
copies, which they call tasks. A single task is an ordinary process. As many tasks as a plan has
nodes start the ranks of one node each; as many as it has stages are one rank each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from llmpq.errors import SpecError

LOOPBACK = "127.0.0.1"


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
