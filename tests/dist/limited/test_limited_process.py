"""Jobs in child processes: limits of time and memory, and callers that go away."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from helpers.clocks import PATIENCE_S

from llmpq.dist.limited.limited_process import (
    NICENESS,
    JobLimitError,
    JobLimits,
    LimitedProcesses,
)
from llmpq.errors import StageError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def processes(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    found = LimitedProcesses("helpers.limited_jobs", {"a": 1}, JobLimits(cpu_s=1.0), count=1)
    yield found
    found.close()


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_jobs_share_a_child_and_have_its_setup(processes):
    async def scenario():
        first, second = [await processes.run(job) for job in ("x", ["é", None])]
        assert (first[:2], second[:2]) == ([{"a": 1}, "x"], [{"a": 1}, ["é", None]])
        assert first[2] == second[2]

    run(scenario)


def test_children_yield_the_processor_to_the_ranks_from_their_imports_on(processes):
    async def scenario():
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert await processes.run("priority") == [min(19, own + NICENESS)] * 2

    run(scenario)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ("loop", "more than 1 s of processor time"),
        ("memory", "more than 512 MiB of memory"),
        ("abort", "more than 512 MiB of memory"),
    ],
)
def test_a_job_above_a_limit_ends_alone(processes, job, message):
    async def scenario():
        with pytest.raises(JobLimitError, match=message):
            await processes.run(job)
        assert (await processes.run("x"))[1] == "x"

    run(scenario)


def test_an_error_of_a_job_quotes_nothing_of_it(processes):
    async def scenario():
        with pytest.raises(StageError, match=r"SystemError$"):
            await processes.run("error")

    run(scenario)


def test_a_caller_that_goes_away_ends_its_child(processes):
    async def scenario():
        await processes.run("x")
        waiting = asyncio.create_task(processes.run("wait"))
        queued = asyncio.create_task(processes.run("wait"))
        last = asyncio.create_task(processes.run("x"))
        await asyncio.sleep(0)  # they are submitted
        for task in (queued, waiting):
            task.cancel()
        # One thread does the jobs: the last one would wait for the others for ever.
        assert (await last)[1] == "x"

    run(scenario)


def test_a_program_that_does_not_start_is_an_error():
    processes = LimitedProcesses("helpers.no_such_module", None, JobLimits(cpu_s=1.0))

    async def scenario():
        with pytest.raises(StageError, match="did not start"):
            await processes.run("x")

    run(scenario)
    processes.close()
