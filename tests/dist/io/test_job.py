"""A job file keeps every field, and invalid values are rejected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llmpq.batching.length import Prediction
from llmpq.dist.io.job import DriftHandling, Job, Rendezvous, read_job, write_job
from llmpq.dist.io.sampling_params import SamplingParams
from llmpq.errors import SpecError
from llmpq.spec.schedule import Schedule


def _job(**options: object) -> Job:
    paths = {name: Path(f"/somewhere/{name}") for name in ("strategy", "model_dir", "prompts")}
    return Job(**paths, output=Path("/somewhere/else"), **options)


@pytest.mark.parametrize(
    "rendezvous",
    [
        Rendezvous(file=Path("/private/rendezvous")),
        Rendezvous(address=("10.0.0.1", 29500)),
        Rendezvous(from_environment=True),
    ],
)
def test_round_trip(tmp_path, rendezvous):
    sampling = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, seed=3)
    job = _job(
        resume=True, sampling=sampling, step_timeout_s=3.0, rendezvous=rendezvous, launcher_pid=12
    )
    job = replace(
        job,
        schedule=Schedule(policy="multibin", decode_batch=4, boundaries=(3.0, 9.5)),
        prediction=Prediction(predictor="noisy", error=0.5, seed=3),
        pins_workers=False,
        drift=DriftHandling(replans=True, lengths=Path("/somewhere/lengths.json")),
    )
    write_job(tmp_path / "job.json", job)
    assert read_job(tmp_path / "job.json") == job


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_senseless_timeout_is_refused(seconds):
    with pytest.raises(SpecError, match="step_timeout"):
        _job(step_timeout_s=seconds)
