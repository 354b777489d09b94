"""Tasks of srun and mpirun: numbers, hosts, and what is no step of theirs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmpq.dist.launch.process_environment import (
    Task,
    first_host,
    started_task,
    tasks_of_nodes,
    torchrun_task,
)
from llmpq.errors import SpecError

# Task 3 of `srun --nodes 2 --ntasks 4`, after srun(1), "OUTPUT ENVIRONMENT VARIABLES".
SLURM = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07,09]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
# Rank 1 of `mpirun -n 2` of Open MPI on one host.
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}


def _numbers(task):
    return task.rank, task.world_size, task.local_rank, task.local_world_size, task.first_host


def test_slurm_numbers_tasks_and_names_hosts():
    assert _numbers(started_task(SLURM)) == (3, 4, 1, 2, "gpu07")
    assert started_task(SLURM).local_ranks == range(2, 4)
    uneven = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"}
    assert _numbers(started_task(uneven)) == (3, 4, 0, 1, "gpu07")
    one_host = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_LOCALID": "3", "SLURM_NODEID": "0"}
    assert _numbers(started_task(one_host)) == (3, 4, 3, 4, "127.0.0.1")


def test_open_mpi_numbers_tasks_and_names_no_other_host():
    assert _numbers(started_task(OPEN_MPI)) == (1, 2, 1, 2, "127.0.0.1")
    two_hosts = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    assert _numbers(started_task(two_hosts)) == (1, 2, 0, 1, None)


@given(st.data())
def test_ranks_of_a_host_hold_its_own_in_any_order(data):
    """mpirun may number the tasks of a host in another order than its local numbers."""
    size = data.draw(st.integers(1, 9))
    local_size = data.draw(st.integers(1, size))
    rank, local_rank = (data.draw(st.integers(0, end - 1)) for end in (size, local_size))
    task = Task(
        launcher="mpirun",
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
    )
    assert rank in task.local_ranks
    assert set(task.local_ranks) <= set(range(size))
    assert len(task.local_ranks) == local_size


def test_torchruns_variables_are_read_by_name():
    found = torchrun_task(
        {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    )
    assert _numbers(found) == (5, 8, 1, 4, None)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}
        | {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        # A batch script that runs the command without srun.
        {"SLURM_JOB_ID": "41", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NODEID": "0"},
    ],
    ids=["nothing", "one task", "batch script"],
)
def test_a_process_alone_is_no_task(environ):
    assert started_task(environ) is None


@pytest.mark.parametrize(
    ("environ", "word"),
    [
        (SLURM | {"SLURM_PROCID": "x"}, "SLURM_PROCID"),
        (SLURM | {"SLURM_PROCID": "4"}, "task 4 of 4"),
        (SLURM | {"SLURM_NODEID": "2"}, "SLURM_NODEID"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(y2)"}, "SLURM_STEP_TASKS_PER_NODE"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": ""}, "OMPI_COMM_WORLD_LOCAL_RANK"),
    ],
)
def test_other_values_are_refused_by_name(environ, word):
    with pytest.raises(SpecError, match=word):
        started_task(environ)


# What `scontrol show hostnames LIST` prints first.
@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("login", "login"),
        ("a,b", "a"),
        ("gpu[03-05,09],login", "gpu03"),
        ("gpu[12,3]", "gpu12"),
        ("rack[1-2]-gpu[08-09].site", "rack1-gpu08.site"),
        ("", None),
    ],
)
def test_first_host_of_a_list(nodes, host):
    assert first_host(nodes) == host


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 5)), min_size=1, max_size=6))
def test_tasks_of_nodes_reads_what_slurm_writes(runs):
    text = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else str(tasks) for tasks, nodes in runs)
    assert tasks_of_nodes(text) == [tasks for tasks, nodes in runs for _ in range(nodes)]
