"""Experts on threads, and weights on disk, of ranks that are processes: cores, and kills."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.processes import At, workers_of
from helpers.ranks import make_plan, with_weights_on_disk
from helpers.tiny_models import generate_alone, load_reference, save_tiny_model

from llmpq import AsyncEngine, GenerationRequest, SamplingParams
from llmpq.dist import generate_offline
from llmpq.dist.io.prompts import Prompt
from llmpq.dist.launch.process_environment import HOST_CORES, host_cores
from llmpq.dist.launch.ranks import rank_environment
from llmpq.kernels.cpu.native import has_steps, instruction_set, library
from llmpq.spec.precision import LayerExperts, StageExperts

torch.set_num_threads(1)
HAS_STEPS = library() is not None and has_steps(instruction_set())
PROMPTS = [[3 + number, 4, 5, 6] for number in range(4)]
FREE = SamplingParams(ignore_eos=True, max_tokens=24)


def _plan(cuts, threads=1, host_ranks=(0, 1)):
    """A plan whose experts are on their hosts, but for two of each layer."""
    plan = make_plan(cuts, batch=4, prompt_tokens=16, new_tokens=24)
    stages = [
        stage
        if stage.rank not in host_ranks
        else replace(
            stage,
            experts=StageExperts(
                threads=threads,
                layers=tuple(
                    LayerExperts(layer=layer, resident=(1, 2))
                    for layer in range(stage.first_layer, stage.end_layer)
                ),
            ),
        )
        for stage in plan.stages
    ]
    return replace(plan, stages=tuple(stages))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    shape = {"layers": 3, "hidden": 64, "intermediate": 32, "heads": 4, "kv_heads": 2}
    folder = tmp_path_factory.mktemp("model") / "mixtral"
    return save_tiny_model("mixtral", folder, shape=shape, seed=1)


@pytest.fixture(scope="module")
def expected(model_dir):
    model = load_reference(model_dir)
    model.generation_config.eos_token_id = None
    return [generate_alone(model, prompt, 24)[0][len(prompt) :] for prompt in PROMPTS]


async def _tokens_of(engine, number, begun=None):
    item = GenerationRequest(id=str(number), prompt_token_ids=tuple(PROMPTS[number]), sampling=FREE)
    found: list[int] = []
    async with aclosing(engine.generate(item)) as outputs:
        async for output in outputs:
            found += output.token_ids
            if begun is not None and len(found) > 4:
                begun.set()
    return found


def _on_disk(cuts):
    """A plan whose second rank reads all its weights from disk."""
    plan = make_plan(cuts, batch=4, prompt_tokens=16, new_tokens=24)
    return with_weights_on_disk(plan, range(cuts[1], cuts[-1]))


def _both(cuts):
    """A plan whose first rank has experts on threads; the second reads its weights from disk."""
    return with_weights_on_disk(_plan(cuts, host_ranks=(0,)), range(cuts[1], cuts[-1]))


@pytest.mark.dist
@pytest.mark.parametrize(
    "planned", [_both, *(pytest.param(one, marks=pytest.mark.slow) for one in (_plan, _on_disk))]
)
def test_streams_go_on_when_a_rank_is_killed(planned, model_dir, expected, tmp_path):
    """Also one that is reading weights from disk: it reads them again from its store."""

    async def main() -> None:
        store = {} if planned is _plan else {"store": tmp_path / "store"}
        engine = await AsyncEngine.start(planned((0, 1, 3)), model_dir, token_budget=9, **store)
        try:
            begun, before = asyncio.Event(), dict(workers_of(os.getpid()))
            tasks = [asyncio.create_task(_tokens_of(engine, n, begun)) for n in range(4)]
            await begun.wait()
            stored = _files(tmp_path)
            os.kill(before[1], signal.SIGKILL)
            assert await asyncio.gather(*tasks) == expected
            assert _files(tmp_path) == stored  # what was written is read, not written once more
            assert bool(stored) == (planned is not _plan)
        finally:
            await engine.close()
        assert not workers_of(os.getpid())

    asyncio.run(main())


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and size of the files below a folder, but for locks."""
    return {
        str(path.relative_to(folder)): (path.stat().st_ino, path.stat().st_size)
        for path in folder.rglob("*")
        if path.is_file() and path.stat().st_size
    }


@pytest.mark.dist
def test_threads_of_a_rank_have_the_core_after_those_of_the_devices(model_dir, expected):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 or not HAS_STEPS:
        pytest.skip("needs two cores, AVX2 and a C compiler")
    seen: dict[str, str] = {}

    def look() -> None:
        (pid,) = workers_of(os.getpid()).values()
        for path in Path(f"/proc/{pid}/task").iterdir():
            fields = dict(
                line.split(":\t", 1)
                for line in (path / "status").read_text().splitlines()
                if ":\t" in line
            )
            seen[path.name] = fields["Cpus_allowed_list"]

    prompts = [
        Prompt(id=f"p{n}", where="", token_ids=tuple(prompt), max_new_tokens=24, ignore_eos=True)
        for n, prompt in enumerate(PROMPTS)
    ]
    found = generate_offline(_plan((0, 3)), prompts, model_dir=model_dir, progress=At(20, look))
    assert [list(one.token_ids) for one in found] == expected
    assert str(cores[1]) in seen.values()
    assert set(seen.values()) == {str(cores[0]), str(cores[1])}


def test_cores_of_experts_come_after_those_of_all_devices():
    plan = _plan((0, 1, 3), threads=2)
    found = [host_cores(rank_environment(plan, rank, (0, 1), range(10, 16))) for rank in range(2)]
    assert found == [(12, 13), (14, 15)]
    assert rank_environment(plan, 0, (0, 1), range(5))[HOST_CORES] == ""
    assert rank_environment(make_plan((0, 3)), 0, (0,), range(4))[HOST_CORES] == ""


def test_threads_of_a_device_without_a_number_leave_cores_for_experts():
    plan = _plan((0, 3), threads=3)
    group = replace(plan.cluster.nodes[0].devices[0], threads=None)
    cluster = replace(plan.cluster, nodes=(replace(plan.cluster.nodes[0], devices=(group,)),))
    found = rank_environment(replace(plan, cluster=cluster), 0, (0,), range(8))
    assert found["OMP_NUM_THREADS"] == "5"
    assert host_cores(found) == (5, 6, 7)
