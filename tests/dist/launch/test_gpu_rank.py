"""What a rank on a GPU checks, sets and reports; tried without one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.draft_plans import with_draft
from helpers.ranks import make_plan
from helpers.tiny_configs import stored_fields, tiny_config

from llmpq.dist.io.job import Job
from llmpq.dist.launch import rank as rank_module
from llmpq.dist.launch.rank import (
    RankContext,
    check_free_memory,
    decode_sizes,
    kv_blocks_of,
    more_state_bytes,
)
from llmpq.dist.launch.ranks import rank_environment
from llmpq.dist.metrics.measurement import HeldBytes
from llmpq.dist.metrics.progress import SilentProgress
from llmpq.dist.metrics.report import memory_parts
from llmpq.dist.metrics.stats import StageClock
from llmpq.errors import CapacityError
from llmpq.options.engine import EngineOptions
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.plan import MemoryParts, MicroBatching
from llmpq.units import GIB

DEMO = Path(__file__).parents[3] / "models" / "demo"
GPU = torch.device("cuda", 0)
PARTS = MemoryParts(
    weights=10 * GIB, kv=4 * GIB, temporary=2 * GIB, master=1 * GIB, runtime=9 * GIB
)


def plan_on(*types):
    groups = tuple(DeviceGroup(type=name, count=1) for name in types)
    cluster = Cluster(name="c", nodes=(Node(name="n", devices=groups),))
    plan = make_plan(tuple(range(len(types) + 1)), cluster=cluster, batch=4, decode=3)
    stages = tuple(replace(one, memory=PARTS) for one in plan.estimate.stages)
    return replace(plan, estimate=replace(plan.estimate, stages=stages))


def context_of(plan, rank=0, **options):
    job = Job(model_dir=DEMO, strategy=Path("s"), prompts=Path("p"), output=Path("o"), **options)
    return RankContext(job=job, plan=plan, rank=rank, progress=SilentProgress())


@pytest.fixture
def memory(monkeypatch):
    """Free and all bytes of the GPU."""
    found = SimpleNamespace(free=80 * GIB, total=80 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (found.free, found.total))
    return found


def test_a_gpu_with_too_little_free_memory_is_one_clear_error(memory):
    context = context_of(plan_on("H100"))
    blocks = kv_blocks_of(context)
    memory.free = 17 * GIB
    check_free_memory(context, GPU, blocks)
    memory.free -= 1
    with pytest.raises(CapacityError, match=r"cuda:0 has 17.0 GiB free of 80.0 GiB") as caught:
        check_free_memory(context, GPU, blocks)
    for part in ("weights 10", "keys and values 4", "temporary memory 2", "embeddings and head 1"):
        assert part in str(caught.value)


def test_more_blocks_and_a_draft_model_count(memory):
    plan = plan_on("H100")
    blocks = kv_blocks_of(context_of(plan))
    memory.free = 18 * GIB
    with pytest.raises(CapacityError, match="keys and values 8"):
        check_free_memory(context_of(plan), GPU, 2 * blocks)
    drafting = with_draft(plan, "m", device=0)
    drafting = replace(drafting, draft=replace(drafting.draft, memory_bytes=2 * GIB))
    with pytest.raises(CapacityError, match="draft model 2"):
        check_free_memory(context_of(drafting), GPU, blocks)


def test_a_cpu_is_not_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", None)
    check_free_memory(context_of(plan_on("cpu")), torch.device("cpu"), 1)


def test_the_check_comes_before_anything_is_loaded(memory, monkeypatch):
    memory.free = 1
    monkeypatch.setattr(rank_module, "torch_device", lambda *_: GPU)
    monkeypatch.setattr(rank_module, "load_master_of", None)
    clock = StageClock(micro_batching=MicroBatching(prefill=1, decode=1))
    with pytest.raises(CapacityError):
        rank_module._load(context_of(plan_on("H100")), clock, None)


def test_decode_steps_of_a_batch_are_those_of_its_plan():
    plan = plan_on("H100")
    found = decode_sizes(context_of(plan).job, plan)
    assert (found.rows, found.most_tokens) == (3, plan.workload.max_context_tokens)


def test_a_rank_of_a_gpu_gets_its_variables(monkeypatch, tmp_path):
    for name in ("TRITON_CACHE_DIR", "TORCH_CUDNN_SDPA_DEPRIORITIZED"):
        monkeypatch.delenv(name, raising=False)
    plan = plan_on("H100", "cpu")
    found = rank_environment(plan, 0, [0, 1], [0], tmp_path / "store")
    assert found["TORCH_CUDNN_SDPA_DEPRIORITIZED"] == "1"
    assert found["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
    assert "TRITON_CACHE_DIR" not in rank_environment(plan, 0, [0, 1], [0])
    assert not [name for name in rank_environment(plan, 1, [0, 1], [0]) if "CUDNN" in name]
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    assert rank_environment(plan, 0, [0], [0], tmp_path)["TRITON_CACHE_DIR"] == "mine"


def test_reserved_memory_and_that_of_all_processes_are_reported(memory, monkeypatch):
    memory.free = 30 * GIB
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 20 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 40 * GIB)
    held = HeldBytes(weights=1, master=1, kv=1, buffers=0, load_peak=1)
    clock = StageClock(micro_batching=MicroBatching(prefill=1, decode=1), held=held)
    stats = clock.stats(0, GPU)
    assert (stats.memory_bytes, stats.reserved_bytes) == (20 * GIB, 40 * GIB)
    parts = memory_parts(plan_on("H100"), stats)
    assert parts["reserved"] == {"measured": 40 * GIB}
    assert parts["device_used"] == {"measured": 50 * GIB}
    on_cpu = memory_parts(plan_on("cpu"), clock.stats(0, torch.device("cpu")))
    assert not {"reserved", "device_used"} & set(on_cpu)


def test_states_beyond_the_plan_count(memory, tmp_path):
    fields = stored_fields(tiny_config("qwen3_5_text"))
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model, plan = load_model_dir(tmp_path), plan_on("H100", "H100")

    def context(size, rank=0):
        engine = EngineOptions(state_cache_bytes=size)
        found = context_of(plan, rank, task="online", engine=engine)
        return replace(found, job=replace(found.job, model_dir=tmp_path))

    assert [more_state_bytes(context(5 * model.state_bytes(), rank)) for rank in (0, 1)] == [
        5 * model.state_bytes(stage.first_layer, stage.end_layer) for stage in plan.stages
    ]
    blocks = kv_blocks_of(context(0))
    memory.free = 17 * GIB
    check_free_memory(context(0), GPU, blocks)
    large = context(GIB)
    with pytest.raises(CapacityError, match="states beyond the plan"):
        check_free_memory(large, GPU, blocks)
