"""Simulator, planner and ranks have the same limits, on every strategy of the repository."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.ranks import make_plan
from hypothesis import given
from hypothesis import strategies as st
from transformers import BloomConfig, OPTConfig

from llmpq.assigner.forecast import costs_of_plan
from llmpq.batching.blocks import OffloadLimits
from llmpq.cli.commands import serve, sim
from llmpq.cli.engine_simulation import simulated_limits
from llmpq.dist.io.job import Job, read_job, write_job
from llmpq.dist.launch.rank import limits_of_model
from llmpq.errors import CapacityError, SpecError
from llmpq.multillm.engine.law import plan_law
from llmpq.options.declare import read_options
from llmpq.options.engine import EngineOptions
from llmpq.options.limits import (
    check_host_memory,
    engine_limits,
    planned_speculation,
    policy_limits,
    window_blocks,
)
from llmpq.spec import catalog
from llmpq.spec.plan import Plan, PlannedDraft, read_plan
from llmpq.spec.runtime_constants import KV_FILE_HEADER_BYTES
from llmpq.units import GIB

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
    return limits_of_model(plan, read_job(path).engine, config_of(plan), 0)


def sim_limits(words, plan):
    options = sim._parser().parse_args(["--strategy", "plan.json", "--engine", *words])
    return simulated_limits(options, plan, catalog.model(plan.model.name))


@pytest.mark.parametrize("words", GIVEN, ids=" ".join)
@pytest.mark.parametrize("file", STRATEGIES, ids=lambda file: file.stem)
def test_a_simulation_has_the_limits_of_the_run(file, words, tmp_path):
    plan = read_plan(file)
    assert sim_limits(words, plan) == run_limits(words, plan, tmp_path)


def test_saved_states_are_simulated_as_they_run():
    plan, model = read_plan(STRATEGIES[0]), catalog.model("Qwen/Qwen3.5-0.8B")
    own, slots = model.state_bytes(), []
    for words in ((), ("--state_cache_size", "1")):
        run, simulated = serve._parser(), sim._parser()
        engine = read_options(EngineOptions, run.parse_args(["--strat_file_name", "a", *words]))
        asked = simulated.parse_args(["--strategy", "a", "--engine", *words])
        slots.append(simulated_limits(asked, plan, model).num_state_slots)
        assert slots[-1] == engine_limits(plan, engine, state_bytes=own).num_state_slots
    assert slots[1] == slots[0] + GIB // own


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


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("batch", [1, 3])
@given(host=st.integers(0, 10**7), disk=st.integers(0, 10**7), block=st.integers(1, 5000))
def test_copies_of_blocks_never_take_more_than_their_budgets(batch, window, host, disk, block):
    plan = make_plan((0, 1, 3), batch=batch, prompt_tokens=1100, new_tokens=20)
    num_windows = window_blocks(plan, window) or 0
    blocks = batch * 70
    assert (num_windows > 0) == (window is not None)
    kv = [blocks * block, blocks * block + num_windows * 7]  # bytes of both stages
    stages = [
        replace(one, memory=replace(one.memory, kv=size))
        for one, size in zip(plan.estimate.stages, kv, strict=True)
    ]
    plan = replace(plan, estimate=replace(plan.estimate, stages=tuple(stages)))
    options = EngineOptions(
        kv_offloading_bytes=host,
        kv_offloading_folder="files",
        kv_offloading_disk_bytes=disk,
        num_blocks=5 * batch,
    )
    kept = engine_limits(plan, options, window_tokens=window).offload
    each = 2 * block
    assert kept.host_blocks * each + kept.host_window_blocks * 7 <= host
    files = 2 * KV_FILE_HEADER_BYTES
    taken = kept.disk_blocks * (each + files) + kept.disk_window_blocks * (7 + files)
    assert taken <= disk
    assert host - kept.host_blocks * each - kept.host_window_blocks * 7 < each + 7
    without = replace(options, kv_offloading_folder=None)
    assert engine_limits(plan, without, window_tokens=window).offload.disk_blocks == 0
    assert policy_limits(plan, options, window_tokens=window).offload == OffloadLimits()


def test_a_host_has_memory_for_its_stages_and_the_copies_of_their_blocks():
    plan = make_plan((0, 1, 3), batch=3)  # each stage takes 5 bytes, 1 of them for keys and values
    options = EngineOptions(kv_offloading_bytes=8 * GIB)
    check_host_memory(plan, options, [0, 1], 8 * GIB + 10)
    check_host_memory(plan, options, [1], 4 * GIB + 5)
    with pytest.raises(CapacityError, match=r"size: found 8.00 GiB, expected at most 6.00 GiB: .*"):
        check_host_memory(plan, options, [1], 3 * GIB + 5)
    with pytest.raises(CapacityError, match=r"expected at most 0 B.*stages take 10 B"):
        check_host_memory(plan, options, [0, 1], 3)


def test_copies_of_blocks_are_of_the_prefix_cache():
    with pytest.raises(SpecError, match="kv_offloading_bytes: found without prefix caching"):
        EngineOptions(kv_offloading_bytes=1, prefix_caching=False)
    words = ["--kv_offloading_size", "1.5", "--kv_offloading_folder", "files"]
    options = serve._parser().parse_args(["--strat_file_name", "plan.json", *words])
    engine = read_options(EngineOptions, options)
    assert engine.kv_offloading_bytes == 1.5 * GIB
    assert engine.kv_offloading_folder == Path("files").resolve()
    assert engine.kv_offloading_disk_bytes == 32 * GIB
