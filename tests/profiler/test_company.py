"""Companions work only when they are let go, on their own core, and never outlive their parent."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from llmpq.errors import StageError
from llmpq.profiler import company as company_module
from llmpq.profiler.bench import LayerJob
from llmpq.profiler.company import Company, job_from_json, job_to_json
from llmpq.profiler.grid import product_grid

CORE = min(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def job(tiny_model):
    torch.set_num_threads(1)
    return LayerJob(
        model_dir=tiny_model("llama"),
        bits=(16, 4),
        shapes=product_grid((1, 2), (4,), (5,)),
        dtype=torch.float32,
        device=torch.device("cpu"),
        layers=2,
        seed=7,
    )


def cpu_ticks(pid: int) -> int:
    """Return what a process has computed so far, in the kernel's ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_job_survives_the_way_to_a_companion(job):
    assert job_from_json(job_to_json(job), seed=7) == job


def test_companions_work_on_their_core_while_they_may_and_end_with_the_company(job):
    company = Company(job, [CORE])
    try:
        (pid,) = [one.pid for one in company._companions]
        assert os.sched_getaffinity(pid) == {CORE}
        before = cpu_ticks(pid)
        time.sleep(0.1)
        assert cpu_ticks(pid) == before
        with company:
            deadline = time.monotonic() + 10
            while cpu_ticks(pid) == before and time.monotonic() < deadline:
                time.sleep(0.02)
        assert cpu_ticks(pid) > before
    finally:
        company.close()
    assert not Path(f"/proc/{pid}").exists()


def test_a_companion_that_cannot_start_is_told(job, monkeypatch):
    monkeypatch.setattr(company_module, "job_to_json", lambda _: {"not": "a job"})
    with pytest.raises(StageError, match="before it was ready"):
        Company(job, [CORE])
