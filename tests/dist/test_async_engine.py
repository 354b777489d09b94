"""AsyncEngine: streams, aborts, drains, and answers that survive the death of a rank."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.block_steps import BlockSteps
from helpers.clocks import PATIENCE_S
from helpers.ranks import make_plan

from llmpq.batching.engine_step import EngineLimits
from llmpq.batching.queue_order import queue_order
from llmpq.dist.async_engine import AsyncEngine
from llmpq.dist.engine.online_run import OnlineRun
from llmpq.dist.io.control_channel import ControlChannel, ModelLimits
from llmpq.dist.io.generation import GenerationRequest, TokenOutput
from llmpq.dist.io.sampling_params import SamplingParams, StructuredOutputsParams
from llmpq.dist.launch import ranks as module
from llmpq.dist.launch.ranks import RESTART_WINDOW_S
from llmpq.dist.transport.endpoint import Endpoint
from llmpq.errors import SpecError, StageError, StoppedError

torch.set_num_threads(1)
FREE = SamplingParams(ignore_eos=True, max_tokens=8)
NUM_BLOCKS = 40


class Ranks:
    """Plays the ranks of every start: the real loop, on blocks that hold token ids."""

    def __init__(self, model_dir: Path) -> None:
        self.steps = BlockSteps(model_dir, NUM_BLOCKS, 4)
        self.fails_at: list[int | None] = []  # step of each start at which a rank dies
        self.starts = 0
        self.slow_s = 0.0
        self.may_step = threading.Event()
        self.may_step.set()
        self.engines: list[OnlineRun] = []

    def launch(self, job, *rest) -> None:
        check: Callable[[], None] = rest[-1]
        self.starts += 1
        self.steps.cells[:] = -1
        self.steps.steps.clear()
        self.steps.dispatched = 0
        self.steps.fails_at = self.fails_at.pop(0) if self.fails_at else None
        if self.steps.fails_at == 0:
            raise StageError("stage 0: was ended by SIGKILL")
        options = job.engine
        with Endpoint(path=str(job.prompts)).connect(PATIENCE_S) as sock:
            sock.settimeout(None)
            engine = OnlineRun(
                channel=ControlChannel(sock),
                executor=Checked(self, check),
                limits=EngineLimits(
                    token_budget=options.token_budget or 16,
                    max_sequences=options.max_sequences or 8,
                    num_blocks=options.num_blocks or NUM_BLOCKS,
                    block_size=4,
                    prefix_caching=options.prefix_caching,
                ),
                order=queue_order(options.scheduler),
                model=ModelLimits(max_model_len=40, vocab_size=100),
            )
            self.engines.append(engine)
            engine.run()


class Checked:
    """A step runner that also calls the launcher's check, and may be slow."""

    def __init__(self, ranks: Ranks, check: Callable[[], None]) -> None:
        self._ranks, self._check = ranks, check

    def __getattr__(self, name: str):
        return getattr(self._ranks.steps, name)

    def dispatch(self, *values) -> None:
        self._check()
        assert self._ranks.may_step.wait(PATIENCE_S)
        time.sleep(self._ranks.slow_s)
        self._ranks.steps.dispatch(*values)


@pytest.fixture
def ranks(tiny_model, monkeypatch) -> Ranks:
    found = Ranks(tiny_model("llama", seed=1))
    monkeypatch.setattr(module, "launch", found.launch)
    return found


@asynccontextmanager
async def running(ranks: Ranks, tiny_model, **options) -> AsyncIterator[AsyncEngine]:
    model_dir = tiny_model("llama", seed=1)
    engine = await AsyncEngine.start(make_plan((0, 3)), model_dir, **options)
    try:
        yield engine
    finally:
        await engine.close()


def request(name: str, prompt, sampling: SamplingParams = FREE) -> GenerationRequest:
    return GenerationRequest(id=name, prompt_token_ids=tuple(prompt), sampling=sampling)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def collect(engine: AsyncEngine, item: GenerationRequest) -> list[TokenOutput]:
    async with aclosing(engine.generate(item)) as outputs:
        return [output async for output in outputs]


def tokens_of(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def greedy(ranks: Ranks, prompt, count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(ranks.steps.scores(tuple(tokens)).argmax()))
    return tokens[len(prompt) :]


def test_requests_are_answered_together_and_as_by_generate(ranks, tiny_model):
    async def main() -> None:
        async with running(ranks, tiny_model) as engine:
            assert engine.is_alive
            assert (engine.max_model_len, engine.vocab_size) == (40, 100)
            prompts = [[3 + number, 4, 5] for number in range(6)]
            found = await asyncio.gather(
                *(collect(engine, request(str(n), prompt)) for n, prompt in enumerate(prompts))
            )
            for prompt, outputs in zip(prompts, found, strict=True):
                assert tokens_of(outputs) == greedy(ranks, prompt, 8)
                reasons = [output.finish_reason for output in outputs]
                assert reasons == [None] * (len(reasons) - 1) + ["length"]

    asyncio.run(main())


def test_outputs_that_wait_for_a_slow_reader_are_merged(ranks, tiny_model):
    async def main() -> None:
        async with running(ranks, tiny_model) as engine:
            params = replace(FREE, logprobs=1, prompt_logprobs=0)
            async with aclosing(engine.generate(request("a", [3, 4, 5], params))) as outputs:
                first = await anext(outputs)
                await collect(engine, request("b", [3, 4], replace(FREE, max_tokens=16)))
                rest = [output async for output in outputs]
            assert len(rest) == 1
            assert tokens_of([first, *rest]) == greedy(ranks, [3, 4, 5], 8)
            logprobs = [item for output in (first, *rest) for item in output.logprobs or ()]
            assert [item.token_id for item in logprobs] == tokens_of([first, *rest])
            assert first.prompt_logprobs is not None
            assert rest[0].prompt_logprobs is None

    asyncio.run(main())


def test_leaving_the_iterator_aborts_and_frees_the_blocks(ranks, tiny_model):
    async def main() -> None:
        async with running(ranks, tiny_model) as engine:
            params = replace(FREE, max_tokens=30)
            async with aclosing(engine.generate(request("a", [3, 4], params))) as outputs:
                await anext(outputs)
            ranks.may_step.clear()
            waiting = asyncio.create_task(collect(engine, request("b", [5], params)))
            await asyncio.sleep(0)  # it is sent
            await engine.abort("b")
            ranks.may_step.set()
            assert (await waiting)[-1].finish_reason == "abort"
            await until(lambda: ranks.engines[-1].scheduler.is_idle)
            assert ranks.engines[-1].scheduler.free_blocks == NUM_BLOCKS

    asyncio.run(main())


def test_counters_change_while_tokens_are_made(ranks, tiny_model):
    async def main() -> None:
        async with running(ranks, tiny_model) as engine:
            ranks.slow_s = 0.05
            params = replace(FREE, max_tokens=30)
            task = asyncio.create_task(collect(engine, request("a", [3] * 9, params)))
            await until(lambda: engine.stats.running == 1)
            assert engine.stats.num_blocks == NUM_BLOCKS
            assert 0 < engine.stats.kv_cache_usage < 1
            await task
            await until(lambda: engine.stats.running == 0)
            assert engine.stats.kv_cache_usage == 0

    asyncio.run(main())


def test_bad_requests_are_errors_of_their_own(ranks, tiny_model):
    async def main() -> None:
        async with running(ranks, tiny_model) as engine:
            for bad in (
                request("a", []),
                request("a", [100]),
                request("a", [3] * 40),
                request("a", [3], SamplingParams(structured_outputs=form("regex", "(a"))),
                request("a", [3], SamplingParams(structured_outputs=form("regex", "a"))),
            ):
                with pytest.raises(SpecError):
                    await collect(engine, bad)
            ranks.may_step.clear()
            task = asyncio.create_task(collect(engine, request("a", [3, 4])))
            await asyncio.sleep(0)  # it is sent
            with pytest.raises(SpecError, match="unfinished"):
                await collect(engine, request("a", [5]))
            ranks.may_step.set()
            assert tokens_of(await task) == greedy(ranks, [3, 4], 8)

    asyncio.run(main())


def form(name: str, text: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(**{name: text})


@pytest.mark.parametrize("params", [FREE, replace(FREE, temperature=1.0, seed=7)])
def test_streams_go_on_after_deaths_with_no_token_twice(ranks, tiny_model, params):
    async def main() -> None:
        long = replace(params, max_tokens=20)
        names = [str(number) for number in range(5)]
        prompts = {name: [3 + number, 4] for number, name in enumerate(names)}
        async with running(ranks, tiny_model, num_blocks=30) as engine:
            expected = {
                n: tokens_of(await collect(engine, request(n, prompts[n], long))) for n in names
            }
        ranks.fails_at = [5, 9, 8, 11]
        async with running(ranks, tiny_model, num_blocks=30, max_restarts=4) as engine:
            found = await asyncio.gather(
                *(collect(engine, request(n, prompts[n], long)) for n in names)
            )
            assert engine.num_restarts == 4
            assert {
                n: tokens_of(outputs) for n, outputs in zip(names, found, strict=True)
            } == expected
            assert engine.is_alive
            assert ranks.engines[-1].scheduler.free_blocks == 30

    asyncio.run(main())


def test_a_request_at_two_deaths_without_a_token_fails_alone(ranks, tiny_model):
    async def main() -> None:
        ranks.fails_at = [3, 1, 1]
        async with running(ranks, tiny_model) as engine:
            with pytest.raises(StageError, match="died 2 times in a row"):
                await collect(engine, request("a", [3, 4]))
            assert tokens_of(await collect(engine, request("b", [3, 4]))) == greedy(
                ranks, [3, 4], 8
            )
        assert (ranks.starts, engine.num_restarts) == (4, 3)

    asyncio.run(main())


@pytest.mark.parametrize("served_s", [1.0, 99.0])
def test_too_many_restarts_within_the_window_end_the_engine(ranks, tiny_model, served_s):
    async def main() -> None:
        ranks.fails_at = [4, 4, 4]
        async with running(ranks, tiny_model, max_restarts=2, clock=steps_of(served_s)) as engine:
            with pytest.raises(StageError, match="SIGKILL"):
                await collect(engine, request("a", [3, 4], replace(FREE, max_tokens=20)))
            assert engine.error is not None
            assert not engine.is_alive
            with pytest.raises(StageError, match="has ended"):
                await collect(engine, request("b", [3, 4]))
        assert ranks.starts == 3

    asyncio.run(main())


def test_restarts_long_ago_do_not_count(ranks, tiny_model):
    async def main() -> None:
        ranks.fails_at = [4, 4, 4, 4]
        clock = steps_of(RESTART_WINDOW_S / 2 + 1)
        async with running(ranks, tiny_model, max_restarts=2, clock=clock) as engine:
            params = replace(FREE, max_tokens=20)
            found = tokens_of(await collect(engine, request("a", [3, 4], params)))
            assert found == greedy(ranks, [3, 4], 20)
            assert engine.num_restarts == 4

    asyncio.run(main())


def steps_of(served_s: float) -> Callable[[], float]:
    """Return a clock that is read when a start is ready and when it ends."""
    times = itertools.count()
    return lambda: next(times) * served_s


def test_a_first_start_that_fails_is_an_error_of_start(ranks, tiny_model):
    async def main() -> None:
        ranks.fails_at = [0]
        with pytest.raises(StageError, match="SIGKILL"):
            async with running(ranks, tiny_model):
                pass

    asyncio.run(main())
    assert ranks.starts == 1


def test_draining_finishes_what_runs_and_takes_nothing_new(ranks, tiny_model):
    async def main() -> None:
        async with running(ranks, tiny_model) as engine:
            ranks.slow_s = 0.01
            task = asyncio.create_task(collect(engine, request("a", [3, 4])))
            await asyncio.sleep(0.02)
            drained = asyncio.create_task(engine.drain(20))
            await asyncio.sleep(0)
            with pytest.raises(StoppedError):
                await collect(engine, request("b", [3]))
            await drained
            assert tokens_of(await task) == greedy(ranks, [3, 4], 8)

    asyncio.run(main())


@asynccontextmanager
async def with_a_slow_answer(ranks: Ranks, tiny_model):
    async with running(ranks, tiny_model) as engine:
        ranks.slow_s = 0.2
        params = replace(FREE, max_tokens=38)
        task = asyncio.create_task(collect(engine, request("a", [3, 4], params)))
        await asyncio.sleep(0.1)
        yield engine, task


def test_a_drain_that_takes_too_long_aborts(ranks, tiny_model):
    async def main() -> None:
        async with with_a_slow_answer(ranks, tiny_model) as (engine, task):
            await engine.drain(0.1)
            assert (await task)[-1].finish_reason == "abort"

    asyncio.run(main())


def test_closing_ends_what_waits(ranks, tiny_model):
    async def main() -> None:
        async with with_a_slow_answer(ranks, tiny_model) as (engine, task):
            await engine.close()
            with pytest.raises(StageError, match="closed"):
                await task

    asyncio.run(main())


def test_clients_that_come_and_go_lose_no_block(ranks, tiny_model):
    """Random arrivals, early ends and deaths: every answer is right as far as it goes."""

    async def client(engine: AsyncEngine, number: int, rng: random.Random) -> None:
        prompt = [3 + rng.randrange(4) for _ in range(rng.randint(1, 12))]
        count, leave = rng.randint(1, 16), rng.randint(0, 30)
        await asyncio.sleep(rng.random())
        found: list[int] = []
        item = request(str(number), prompt, replace(FREE, max_tokens=count))
        async with aclosing(engine.generate(item)) as outputs:
            async for output in outputs:
                found += output.token_ids
                if len(found) > leave:
                    break
        assert found == greedy(ranks, prompt, count)[: len(found)]
        assert len(found) == count or len(found) > leave

    async def main() -> None:
        rng = random.Random(0)
        ranks.fails_at = [15, 12, None]
        async with running(ranks, tiny_model, num_blocks=14, token_budget=7) as engine:
            await asyncio.gather(*(client(engine, n, rng) for n in range(60)))
            await until(lambda: ranks.engines[-1].scheduler.is_idle)
            assert ranks.engines[-1].scheduler.free_blocks == 14
            assert engine.num_restarts == 2

    asyncio.run(main())
