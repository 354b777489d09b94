"""Runs of the online engine on blocks that hold token ids, with scripted requests."""

from __future__ import annotations

from helpers.block_steps import BlockSteps
from helpers.scripted_channel import Script

from llmpq.batching.engine_step import EngineLimits
from llmpq.batching.queue_order import queue_order
from llmpq.dist.engine.online_run import OnlineRun
from llmpq.dist.io.control_channel import ModelLimits
from llmpq.dist.io.generation import GenerationRequest
from llmpq.dist.io.sampling_params import SamplingParams

VOCAB, BLOCK = 100, 4
FREE = SamplingParams(ignore_eos=True, max_tokens=6)


def request(number: int, prompt: list[int], sampling: SamplingParams = FREE) -> GenerationRequest:
    return GenerationRequest(id=f"r{number}", prompt_token_ids=tuple(prompt), sampling=sampling)


def limits(**options) -> EngineLimits:
    values = {"token_budget": 16, "max_sequences": 8, "num_blocks": 64, "block_size": BLOCK}
    return EngineLimits(**(values | options))


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.01
        return self.now_s


def fresh(steps: BlockSteps, most: int, delay: int = 0) -> BlockSteps:
    steps.cells[:] = -1
    steps.steps.clear()
    steps.most, steps.delay, steps.fails_at, steps.dispatched = most, delay, None, 0
    steps.most_in_flight = 0
    return steps


def serve(
    steps: BlockSteps,
    script: Script,
    engine_limits: EngineLimits,
    order: str = "fcfs",
    delay: int = 0,
    **options,
) -> OnlineRun:
    engine = OnlineRun(
        channel=script,
        executor=fresh(steps, engine_limits.steps_in_flight, delay),
        limits=engine_limits,
        order=queue_order(order),
        model=ModelLimits(max_model_len=40, vocab_size=VOCAB, eos_token_ids=frozenset({2})),
        clock=Clock(),
        **options,
    )
    engine.run()
    return engine


def greedy(steps: BlockSteps, prompt: list[int], count: int) -> list[int]:
    """Return transformers' greedy tokens; the scores of a context are computed once."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(steps.scores(tuple(tokens)).argmax()))
    return tokens[len(prompt) :]
