"""Simulator, planner and ranks have the same limits, on every strategy of the repository."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import BloomConfig, OPTConfig

from llmpq.assigner.forecast import costs_of_plan
from llmpq.cli.commands import serve, sim
from llmpq.cli.engine_simulation import simulated_limits
from llmpq.dist.io.job import Job, read_job, write_job
from llmpq.dist.launch.rank import limits_of_model
from llmpq.multillm.engine.law import plan_law
from llmpq.options.declare import read_options
from llmpq.options.engine import EngineOptions
from llmpq.options.limits import planned_speculation
from llmpq.spec import catalog
from llmpq.spec.plan import Plan, PlannedDraft, read_plan

ROOT = Path(__file__).resolve().parents[2]
STRATEGIES = sorted((ROOT / "strategies").glob("*.json"))
GIVEN = ((), ("--token_budget", "300", "--no_prefix_caching"))


def config_of(plan: Plan) -> OPTConfig | BloomConfig:
    layers = plan.model.num_layers
    if "bloom" in plan.model.name:
        return BloomConfig(n_layer=layers)
    return OPTConfig(num_hidden_layers=layers)


def run_limits(words, plan, folder):
    """Return the limits of the ranks that ``llmpq-serve`` starts, through the file of their job."""
    options = serve._parser().parse_args(["--strat_file_name", "plan.json", *words])
    engine = read_options(EngineOptions, options)
    engine = replace(engine, speculative_config=planned_speculation(plan))
    path = folder / "job.json"
    write_job(path, Job(strategy=path, model_dir=folder, prompts=path, output=path, engine=engine))
    return limits_of_model(plan, read_job(path).engine, config_of(plan))


def sim_limits(words, plan):
    options = sim._parser().parse_args(["--strategy", "plan.json", "--engine", *words])
    return simulated_limits(options, plan, catalog.model(plan.model.name))


@pytest.mark.parametrize("words", GIVEN, ids=" ".join)
@pytest.mark.parametrize("file", STRATEGIES, ids=lambda file: file.stem)
def test_a_simulation_has_the_limits_of_the_run(file, words, tmp_path):
    plan = read_plan(file)
    assert sim_limits(words, plan) == run_limits(words, plan, tmp_path)


@pytest.mark.parametrize("words", [(), ("--num_speculative_tokens", "2")], ids=" ".join)
def test_a_planned_draft_model_is_simulated_as_it_runs(words, tmp_path):
    plan = read_plan(STRATEGIES[0])
    draft = PlannedDraft(
        model="facebook/opt-125m", bits=8, num_speculative_tokens=5, device=0, acceptance_rate=0.9,
        cost=0.1, handover=0.3, speedup=1.5, memory_bytes=1,
    )  # fmt: skip
    plan = replace(plan, draft=draft)
    found = sim_limits(words, plan)
    assert found.draft is not None
    assert (found.draft.cost, found.draft.handover, found.draft.max_tokens) == (0.1, 0.3, 2048)
    number = int(words[1]) if words else 5
    assert found == replace(run_limits((), plan, tmp_path), num_speculative_tokens=number)


@pytest.mark.parametrize("file", STRATEGIES[:: len(STRATEGIES) // 6], ids=lambda file: file.stem)
def test_applications_are_planned_with_the_limits_of_the_run(file, tmp_path):
    plan = read_plan(file)
    limits = run_limits((), plan, tmp_path)
    law = plan_law(plan, costs_of_plan(plan, catalog.model(plan.model.name)))
    for name in ("token_budget", "num_blocks", "block_size"):
        assert getattr(law, name) == getattr(limits, name)
    assert law.max_sequences <= limits.max_sequences
