"""``--kernel`` decides what multiplies in every rank."""

import pytest
import torch
from helpers.ranks import make_plan, rank_contexts

from llmpq.dist.io.job import Job, read_job, write_job
from llmpq.dist.launch.rank import load_runner
from llmpq.errors import SpecError

SHAPE = {"layers": 2, "hidden": 64, "intermediate": 128, "heads": 4, "kv_heads": 2}


def backends(model_dir, kernel):
    plan = make_plan((0, 2), bits=[8, 8])
    (context,) = rank_contexts(plan, model_dir, kernel=kernel)
    layers = load_runner(context, torch.device("cpu")).layers
    return {module.backend_name for module in layers.modules() if hasattr(module, "backend_name")}


def test_a_rank_multiplies_by_the_kernel_asked_for(tiny_model):
    model_dir = tiny_model("llama", seed=1, shape=SHAPE)
    assert backends(model_dir, "reference") == {"reference"}


def test_llm_int8_of_bitsandbytes_runs_on_a_cpu(tiny_model):
    pytest.importorskip("bitsandbytes")
    model_dir = tiny_model("llama", seed=1, shape=SHAPE)
    assert backends(model_dir, "bnb_int8_cpu") == {"bnb_int8_cpu"}


def test_an_unknown_kernel_is_refused(tiny_model):
    with pytest.raises(SpecError, match="found 'fast'"):
        backends(tiny_model("llama", seed=1, shape=SHAPE), "fast")


def test_workers_are_told_the_kernel(tmp_path):
    job = Job(
        strategy=tmp_path / "s",
        model_dir=tmp_path,
        prompts=tmp_path / "p",
        output=tmp_path / "o",
        kernel="reference",
    )
    write_job(tmp_path / "job.json", job)
    assert read_job(tmp_path / "job.json").kernel == "reference"
