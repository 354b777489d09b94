"""Prompts of slots begin with the blocks of earlier prompts, whose content is what they say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.policies import POLICIES, SLOTS
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.batching import PolicyScheduler, uniform_depth
from llmpq.batching.engine_step import EngineLimits, EngineRequest
from llmpq.batching.policy_scheduler import PipelineDepth

BLOCK, LONGEST = 4, 32
LIMITS = EngineLimits(
    token_budget=SLOTS * LONGEST,
    max_sequences=SLOTS,
    num_blocks=SLOTS * LONGEST // BLOCK,
    block_size=BLOCK,
)


class Memory:
    """What the steps write to the blocks, in the order in which they are taken.

    Args:
        scheduler: of the steps.
        prompts: of the requests, by number.
        answers: how many tokens each has.
    """

    def __init__(self, scheduler, prompts, answers):
        self.scheduler, self.answers = scheduler, answers
        self.tokens = {number: list(prompt) for number, prompt in enumerate(prompts)}
        self.wanted = [len(prompt) + count for prompt, count in zip(prompts, answers, strict=True)]
        self.places: dict[tuple[int, int], int] = {}
        self.in_flight = []
        self.first = {}  # of each request's first chunk
        self.aborted: set[int] = set()

    def take(self, step):
        """Compute a step: what each chunk reads is there, and it writes its own tokens."""
        for chunk in step.chunks:
            self.first.setdefault(chunk.request, chunk.first)
            tokens = self.tokens[chunk.request]
            is_over = chunk.request in self.aborted or (len(tokens) == self.wanted[chunk.request])
            for position in range(chunk.first, chunk.first + chunk.count):
                place = (chunk.blocks[position // BLOCK], position % BLOCK)
                self.places[place] = -1 if is_over else tokens[position]
        for chunk in step.chunks:
            if chunk.request in self.aborted:
                continue
            tokens = self.tokens[chunk.request]
            read = [
                self.places[chunk.blocks[position // BLOCK], position % BLOCK]
                for position in range(min(chunk.first + chunk.count, len(tokens)))
            ]
            if len(tokens) < self.wanted[chunk.request]:
                assert read == tokens[: len(read)]
        self.in_flight.append(step)

    def complete(self):
        """Complete the oldest step."""
        step = self.in_flight.pop(0)
        made, finished = {}, []
        for chunk in step.chunks:
            tokens = self.tokens[chunk.request]
            if chunk.makes_token and chunk.request not in self.aborted:
                made[chunk.request] = len(tokens) % 7
                tokens.append(made[chunk.request])
                if len(tokens) == self.wanted[chunk.request]:
                    finished.append(chunk.request)
        self.scheduler.complete(step.number, made, finished)


def run(name, prompts, answers, *, depth=3, part_tokens=None, abort=None, scores=(), limits=LIMITS):
    """Answer the prompts under a policy; return what the steps wrote."""
    scheduler = PolicyScheduler(
        POLICIES[name](answers), limits, uniform_depth(depth), part_tokens=part_tokens
    )
    memory = Memory(scheduler, prompts, answers)
    for number, (prompt, count) in enumerate(zip(prompts, answers, strict=True)):
        scheduler.add(
            EngineRequest(
                request=number, token_ids=tuple(prompt), prompt_tokens=len(prompt),
                max_tokens=count, arrival_s=0.0, scores_prompt=number in scores,
                predicted_tokens=float(count),
            )
        )  # fmt: skip
    scheduler.close()
    now_s = steps = 0
    while not scheduler.is_done:
        step = scheduler.schedule(now_s)
        steps += 1
        if step is not None:
            memory.take(step)
        elif memory.in_flight:
            memory.complete()
        else:
            now_s += 1
        if steps == abort and scheduler.abort(0):
            memory.aborted.add(0)
    return memory


PARTS = st.lists(st.sampled_from([(0, 0, 0, 0), (0, 0, 0, 1), (1,)]), min_size=1, max_size=6)
PROMPTS = st.lists(
    PARTS.map(lambda parts: [one for part in parts for one in part]), min_size=4, max_size=14
)


@settings(max_examples=150)
@given(
    name=st.sampled_from(sorted(POLICIES)),
    prompts=PROMPTS,
    count=st.integers(1, 8),
    depth=st.integers(1, 3),
    part_tokens=st.none() | st.integers(1, 24),
    abort=st.none() | st.integers(1, 30),
    scores=st.sets(st.integers(0, 8)),
)
def test_every_step_reads_the_tokens_of_its_sequence(name, prompts, count, **options):
    answers = [1 + (count + number) % 8 for number in range(len(prompts))]
    memory = run(name, prompts, answers, **options)
    for number, prompt in enumerate(prompts):
        if number not in memory.aborted:
            assert len(memory.tokens[number]) == len(prompt) + answers[number]
            assert memory.first[number] % BLOCK == 0
            assert memory.first[number] < len(prompt)


@pytest.mark.parametrize("name", POLICIES)
def test_later_prompts_begin_after_the_blocks_of_earlier_ones(name):
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, number] for number in range(3 * SLOTS)]
    memory = run(name, prompts, [3] * len(prompts))
    assert sum(first == 8 for first in memory.first.values()) >= 2 * SLOTS
    assert memory.scheduler.prefix_cache_hits == sum(memory.first.values())


@pytest.mark.parametrize(
    "limits",
    [
        replace(LIMITS, prefix_caching=False),
        replace(LIMITS, window_tokens=4, num_window_blocks=SLOTS * LONGEST),
        replace(LIMITS, switches_after=12),
        replace(LIMITS, num_state_slots=SLOTS),
    ],
    ids=["off", "windows", "two tables of angles", "states"],
)
def test_layers_that_do_not_keep_everything_compute_every_prompt(limits):
    scheduler = PolicyScheduler(POLICIES["hybrid"]([3] * 8), limits, uniform_depth(2))
    split = PolicyScheduler(
        POLICIES["hybrid"]([3] * 8), LIMITS,
        PipelineDepth(prefill_stages=1, decode_stages=1, is_split=True),
    )  # fmt: skip
    for one in (scheduler, split):
        assert one._allocator is None
