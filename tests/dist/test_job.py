"""What the ranks are told survives the file, and senseless values are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmpq.dist.job import Job, Meeting, Sampling, read_job, write_job
from llmpq.errors import SpecError


def _job(**options: object) -> Job:
    paths = {name: Path(f"/somewhere/{name}") for name in ("strategy", "model_dir", "prompts")}
    return Job(**paths, output=Path("/somewhere/else"), **options)


@pytest.mark.parametrize(
    "meeting",
    [
        Meeting(file=Path("/private/meeting")),
        Meeting(address=("10.0.0.1", 29500)),
        Meeting(from_environment=True),
    ],
)
def test_round_trip(tmp_path, meeting):
    sampling = Sampling(temperature=0.7, top_k=5, top_p=0.9, seed=3)
    job = _job(resume=True, sampling=sampling, step_timeout_s=3.0, meeting=meeting, launcher_pid=12)
    write_job(tmp_path / "job.json", job)
    assert read_job(tmp_path / "job.json") == job


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_senseless_timeout_is_refused(seconds):
    with pytest.raises(SpecError, match="step_timeout"):
        _job(step_timeout_s=seconds)
