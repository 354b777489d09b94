"""The compiled simulator of an engine: equal to its rules played one iteration at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers.engine_oracle import Oracle

from llmpq.errors import CapacityError
from llmpq.multillm.engine.law import EngineModel, play


def law(mixed, chance, *, num_blocks=60, max_sequences=8):
    rows = np.arange(max_sequences + 1)
    budget = int(chance.integers(24, 80))
    return EngineModel(
        mixed=mixed,
        max_sequences=max_sequences,
        token_budget=budget,
        num_blocks=num_blocks,
        block_size=4,
        watermark_blocks=2,
        prefill=np.stack([0.01 + 0.002 * rows, 1e-4 + 0 * rows], axis=1),
        decode=np.stack([0.02 + 0.001 * rows, 1e-4 + 0 * rows, 2e-5 + 0 * rows], axis=1),
        packed=0.015 + 3e-4 * np.arange(budget + 1),
        attention=1e-6,
        flops_token=3.0,
        flops_key=0.25,
    )


def requests(chance, count=30):
    ready = chance.random(count) * chance.choice([0.0, 0.5, 5.0])
    prompt, answer = chance.integers(1, 24, count), chance.integers(1, 60, count)
    following = np.full(count, -1)
    for one in range(0, count - 3, 5):  # chains of three, and requests that never become ready
        following[one], following[one + 1] = one + 1, one + 2
        ready[one + 1] = ready[one + 2] = math.inf
    ready[count - 1] = math.inf
    return ready, prompt, answer, following, chance.random(count)


def both(engine, columns, start=0.0, end=math.inf):
    ready, prompt, answer, following, work = columns
    oracle = Oracle(engine, ready, prompt, answer, following, work, start, end)
    oracle.play()
    run = play(
        engine, ready_s=ready, prompt=prompt, answer=answer, following=following, work=work,
        start_s=start, end_s=end,
    )  # fmt: skip
    return oracle, run


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("num_blocks", [21, 30, 400])
def test_the_core_equals_its_rules_one_iteration_at_a_time(mixed, num_blocks):
    preempted = 0
    for seed in range(12):
        chance = np.random.default_rng(seed)
        engine = law(mixed, chance, num_blocks=num_blocks)
        oracle, run = both(engine, requests(chance))
        assert run.finish_s == pytest.approx(oracle.finish, rel=1e-9)
        assert run.made.tolist() == oracle.made
        assert (run.iterations, run.preemptions) == (oracle.iterations, oracle.preemptions)
        assert run.curve[-1] == pytest.approx([oracle.now, oracle.done, oracle.busy], rel=1e-9)
        preempted += run.preemptions
    assert (preempted > 0) == (num_blocks < 400)


@pytest.mark.parametrize("mixed", [False, True])
def test_an_end_stops_before_the_next_iteration(mixed):
    for seed in range(8):
        chance = np.random.default_rng(seed)
        engine, columns = law(mixed, chance), requests(chance)
        whole = play_all(engine, columns).curve[-1, 0]
        oracle, run = both(engine, columns, start=0.25, end=0.25 + chance.random() * whole)
        assert run.made.tolist() == oracle.made
        assert run.finish_s == pytest.approx(oracle.finish, rel=1e-9)


def play_all(engine, columns):
    names = ("ready_s", "prompt", "answer", "following", "work")
    return play(engine, **dict(zip(names, columns, strict=True)))


def test_useful_operations_and_busy_time_rise_along_the_curve():
    chance = np.random.default_rng(5)
    columns = requests(chance, count=5000)
    run = play_all(law(False, chance, max_sequences=2), columns)
    assert len(run.curve) <= 512
    assert (np.diff(run.curve, axis=0) >= 0).all()
    assert run.made[:-1].tolist() == columns[2][:-1].tolist()


def test_a_request_longer_than_the_memory_is_refused():
    chance = np.random.default_rng(0)
    ready, prompt, answer, following, work = requests(chance)
    prompt[3] = 500
    with pytest.raises(CapacityError, match="expected at most 240"):
        play_all(law(False, chance), (ready, prompt, answer, following, work))
