"""A draft model as a process of its own: it may die, and comes back when all ranks restart."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from helpers.draft_plans import with_draft, with_idle_device
from helpers.processes import At, is_running, wait_for, workers_of
from helpers.ranks import make_plan
from helpers.tiny_models import generate_alone, load_reference

from llmpq import AsyncEngine, GenerationRequest, SamplingParams
from llmpq.dist import generate_offline
from llmpq.dist.io.prompts import Prompt

pytestmark = pytest.mark.dist
torch.set_num_threads(1)
PROMPTS = [[3 + number, 4, 5, 6] for number in range(4)]
NEW_TOKENS = 60


def expected_tokens(model_dir: Path) -> list[list[int]]:
    model = load_reference(model_dir)
    model.generation_config.eos_token_id = None
    return [generate_alone(model, prompt, NEW_TOKENS)[0][len(prompt) :] for prompt in PROMPTS]


def plan_of(model_dir: Path):
    plan = make_plan((0, 3), batch=4, decode=4, prompt_tokens=16, new_tokens=NEW_TOKENS)
    return with_draft(with_idle_device(plan), model_dir, device=1, tokens=2)


@pytest.mark.parametrize(
    "end", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_run_goes_on_when_its_draft_model_is_lost(tiny_model, caplog, end):
    model_dir = tiny_model("llama", seed=1)
    pids: dict[int, int] = {}

    def lose() -> None:
        pids.update(workers_of(os.getpid()))
        os.kill(pids[1], end)

    prompts = [
        Prompt(
            id=number, where="", token_ids=tuple(prompt), max_new_tokens=NEW_TOKENS, ignore_eos=True
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    results = generate_offline(
        plan_of(model_dir), prompts, model_dir=model_dir, progress=At(8, lose), step_timeout_s=2.0
    )
    assert [list(result.token_ids) for result in results] == expected_tokens(model_dir)
    assert sorted(pids) == [0, 1]
    assert not any(is_running(pid) for pid in pids.values())
    assert "draft model (rank 1, here/cpu#1" in caplog.text
    assert "going on without drafts" in caplog.text


@pytest.mark.slow
def test_it_is_back_after_a_restart(tiny_model):
    model_dir = tiny_model("llama", seed=1)
    expected = expected_tokens(model_dir)

    async def answers(engine: AsyncEngine, name: str) -> list[list[int]]:
        async def one(number: int) -> list[int]:
            found: list[int] = []
            item = GenerationRequest(
                id=f"{name}{number}",
                prompt_token_ids=tuple(PROMPTS[number]),
                sampling=SamplingParams(ignore_eos=True, max_tokens=NEW_TOKENS),
            )
            async with aclosing(engine.generate(item)) as outputs:
                async for output in outputs:
                    found += output.token_ids
            return found

        return list(await asyncio.gather(*(one(number) for number in range(len(PROMPTS)))))

    async def main() -> None:
        engine = await AsyncEngine.start(plan_of(model_dir), model_dir)
        try:
            assert await answers(engine, "a") == expected
            os.kill(workers_of(os.getpid())[1], signal.SIGKILL)
            assert await answers(engine, "b") == expected
            assert (engine.num_restarts, sorted(workers_of(os.getpid()))) == (0, [0])
            os.kill(workers_of(os.getpid())[0], signal.SIGKILL)
            assert await answers(engine, "c") == expected
            assert (engine.num_restarts, sorted(workers_of(os.getpid()))) == (1, [0, 1])
        finally:
            await engine.close()
        wait_for(lambda: workers_of(os.getpid()), lambda left: not left)

    asyncio.run(main())
