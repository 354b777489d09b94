"""A job file keeps every field, and invalid values are rejected."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from helpers.ranks import make_plan

from llmpq.batching.length import Prediction
from llmpq.dist.io.job import Job, Rendezvous, check_model, read_job, write_job
from llmpq.dist.io.sampling_params import SamplingParams
from llmpq.errors import SpecError
from llmpq.spec.fields import digest_of
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.plan import Schedule
from llmpq.spec.precision import default_precision


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
        replans=True,
        lengths=Path("/somewhere/lengths.json"),
    )
    write_job(tmp_path / "job.json", job)
    assert read_job(tmp_path / "job.json") == job


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_senseless_timeout_is_refused(seconds):
    with pytest.raises(SpecError, match="step_timeout"):
        _job(step_timeout_s=seconds)


def plan_of(model_dir):
    """Return a plan that names its model as llmpq-algo does."""
    model = load_model_dir(model_dir)
    plan = make_plan((0, model.num_layers), source=model_dir)
    inputs = (("model", digest_of(asdict(model))),)
    return replace(
        plan,
        model=replace(plan.model, name=model.name),
        provenance=replace(plan.provenance, inputs=inputs),
    )


def test_a_plan_of_another_model_with_as_many_layers_is_refused(tiny_model):
    own = tiny_model("llama", seed=1)
    other = tiny_model("llama", seed=1, intermediate_size=96)
    check_model(plan_of(own), own, load_model_dir(own))
    with pytest.raises(SpecError, match=r"found a llama of 3 layers, hidden size 32, .* plan's"):
        check_model(plan_of(own), other, load_model_dir(other))


def test_a_plan_of_another_family_with_equal_sizes_is_a_warning(tiny_model, caplog):
    own, other = tiny_model("llama", seed=1), tiny_model("mistral")
    check_model(plan_of(own), other, load_model_dir(other))
    (record,) = caplog.records
    assert "found a mistral of 3 layers" in record.getMessage()


def test_a_plan_whose_own_model_is_not_here_runs_any_of_as_many_layers(
    tiny_model, tmp_path, caplog
):
    own, other = tiny_model("llama", seed=1), tiny_model("llama", seed=1, intermediate_size=96)
    plan = plan_of(own)
    gone = replace(plan, model=replace(plan.model, source=str(tmp_path / "gone")))
    check_model(gone, other, load_model_dir(other))
    (record,) = caplog.records
    assert f"the plan's model {plan.model.name} may be another one" in record.getMessage()


def test_a_copy_of_the_model_of_a_plan_under_another_name_is_no_warning(
    tiny_model, tmp_path, caplog
):
    own = tiny_model("llama", seed=1)
    plan = plan_of(own)
    gone = replace(plan, model=replace(plan.model, source=str(tmp_path / "gone")))
    copy = shutil.copytree(own, tmp_path / "copy")
    model = load_model_dir(copy)
    check_model(gone, copy, model)
    quantized = replace(model, stored=(default_precision(4),) * model.num_layers)
    check_model(gone, copy, quantized)
    assert not caplog.records
