"""Orders of the waiting queue: limits of LARRY's alpha, invariance of its unit, starvation."""

import random
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.batching.block_scheduler import BlockScheduler
from llmpq.batching.engine_step import EngineLimits, EngineRequest
from llmpq.batching.queue_order import QueueOrder, QueueState, queue_order
from llmpq.errors import SpecError

STATE = QueueState(now_s=10.0, mean_prompt_tokens=100.0, mean_prefill_s=1.0)


def _request(number, prompt, arrival_s=0.0, **given_):
    return EngineRequest(
        request=number,
        token_ids=None,
        prompt_tokens=prompt,
        arrival_s=arrival_s,
        **{"max_tokens": 4, **given_},
    )


def _order(name, requests, state=STATE, **given_):
    return [item.request for item in queue_order(name, **given_)(requests, state)]


QUEUE = [
    _request(0, 300, 0.0, priority=1, predicted_tokens=3.0, max_tokens=9),
    _request(1, 100, 4.0, priority=0, max_tokens=2),
    _request(2, 200, 9.0, priority=1, predicted_tokens=1.0, max_tokens=9),
    _request(3, 100, 9.5, priority=0, predicted_tokens=8.0, max_tokens=9),
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fcfs", [0, 1, 2, 3]),
        ("no_preempt", [0, 1, 2, 3]),
        ("spf", [1, 3, 2, 0]),
        ("trail", [2, 1, 0, 3]),  # without a prediction the longest answer counts
        ("priority", [1, 3, 0, 2]),
        ("hrrn", [1, 0, 2, 3]),  # 6 / 100, 10 / 300, 1 / 200 and 0.5 / 100 in order of the queue
    ],
)
def test_order_is_that_of_its_rule(name, expected):
    assert _order(name, QUEUE) == expected


def test_larry_weighs_waiting_against_prompts_by_the_length_of_the_queue():
    # Scores with alpha = 1: 10 - 4 * 3, 6 - 4 * 1, 1 - 4 * 2, 0.5 - 4 * 1
    assert _order("larry", QUEUE, alpha=1.0) == [1, 0, 3, 2]
    # A short queue is in order of arrival: 10 - 2 * 3 and 6 - 2 * 1 are equal.
    assert _order("larry", QUEUE[:2], alpha=1.0) == [0, 1]
    assert _order("larry", QUEUE, alpha=1.0, unit=1000.0) == [0, 1, 2, 3]
    assert _order("larry", QUEUE, alpha=2.0, unit_s=2.0) == [1, 0, 3, 2]
    assert _order("larry", QUEUE, alpha=10.0, unit_s=1.0) == [0, 1, 2, 3]
    unknown = STATE._replace(mean_prefill_s=0.0)
    assert _order("larry", QUEUE, unknown, alpha=10.0) == [0, 1, 2, 3]


def test_unknown_order_and_invalid_parameters_raise_errors():
    with pytest.raises(SpecError, match="found 'sjf', expected one of larry, fcfs, no_preempt"):
        queue_order("sjf")
    with pytest.raises(SpecError, match="alpha -1"):
        queue_order("larry", alpha=-1.0)
    with pytest.raises(SpecError, match="unit 0"):
        queue_order("larry", unit=0.0)
    with pytest.raises(SpecError, match="unit_s 0"):
        queue_order("larry", unit_s=0.0)


def _decisions(seed, name, **given_):
    """Return every step of a random workload that presses on memory; a step takes 0.1 s."""
    chance = random.Random(seed)
    limits = EngineLimits(token_budget=48, max_sequences=8, num_blocks=40, block_size=4)
    scheduler = BlockScheduler(limits, queue_order(name, **given_))
    arrivals, now_s = [], 0.0
    for number in range(40):
        now_s += chance.uniform(0.01, 0.2)
        new = chance.randint(1, 12)
        request = _request(number, chance.randint(1, 60), now_s, max_tokens=new)
        arrivals.append(request)
    left = {request.request: request.max_tokens for request in arrivals}
    steps, now_s = [], 0.0
    while arrivals or not scheduler.is_idle:
        while arrivals and arrivals[0].arrival_s <= now_s:
            scheduler.add(arrivals.pop(0))
        step = scheduler.schedule(now_s)
        now_s += 0.1
        if step is None:
            continue
        steps.append(step)
        made = [chunk.request for chunk in step.chunks if chunk.makes_token]
        for request in made:
            left[request] -= 1
        scheduler.complete(
            step.number,
            dict.fromkeys(made, 0),
            [request for request in made if not left[request]],
            now_s=now_s,
        )
    return steps


SEEDS = st.integers(0, 2**32)


@settings(max_examples=100)
@given(seed=SEEDS)
def test_alpha_0_is_shortest_prompt_first_and_a_large_alpha_is_fcfs(seed):
    assert _decisions(seed, "larry", alpha=0.0) == _decisions(seed, "spf")
    assert _decisions(seed, "larry", alpha=1e5) == _decisions(seed, "fcfs")


@settings(max_examples=100)
@given(
    seed=SEEDS, alpha=st.sampled_from([0.25, 1.0, 8.0]), scale=st.sampled_from([0.25, 2.0, 16.0])
)
def test_scaling_alpha_and_the_inverse_of_the_unit_changes_nothing(seed, alpha, scale):
    found = _decisions(seed, "larry", alpha=alpha, unit=32.0)
    assert _decisions(seed, "larry", alpha=alpha * scale, unit=32.0 / scale) == found


@given(
    prompts=st.lists(st.integers(1, 900), min_size=1, max_size=9),
    arrivals=st.lists(st.floats(0, 64), min_size=9, max_size=9),
    alpha=st.sampled_from([0.01, 0.1, 1.0]),
    scale=st.sampled_from([2, 16]),
)
def test_one_alpha_does_for_prompts_that_are_longer_and_take_longer(
    prompts, arrivals, alpha, scale
):
    def order(times):
        queue = [
            _request(number, prompt * times, at * times)
            for number, (prompt, at) in enumerate(zip(prompts, arrivals, strict=False))
        ]
        return _order("larry", queue, QueueState(64.0 * times, 100.0 * times, 0.5 * times),
                      alpha=alpha)  # fmt: skip

    # Powers of two: nothing is rounded differently.
    assert order(scale) == order(1)


def test_with_waits_in_seconds_longer_prompts_need_another_alpha():
    short = [_request(0, 200, 0.0), _request(1, 100, 1.0)]
    long = [_request(0, 3200, 0.0), _request(1, 1600, 16.0)]
    for units, same in (({}, True), ({"unit_s": 1.0}, False)):
        found = [
            _order("larry", queue, QueueState(2.0 * times, 100.0 * times, 1.0 * times),
                   alpha=1.0, **units)
            for queue, times in ((short, 1), (long, 16))
        ]  # fmt: skip
        assert (found[0] == found[1]) == same


def test_the_prefill_time_of_a_prompt_is_that_of_the_steps_with_prompts():
    states = []

    def scores(waiting, state):
        states.append(state)
        return [0.0] * len(waiting)

    limits = EngineLimits(token_budget=10, max_sequences=1, num_blocks=99, block_size=4)
    scheduler = BlockScheduler(limits, QueueOrder(name="recorded", scores=scores))
    for number, prompt in enumerate((20, 60)):
        scheduler.add(_request(number, prompt, max_tokens=2))
    now_s = 0.0
    for seconds in (0.5, 1.5, 9.0):  # two steps of ten tokens each, and one that decodes
        step = scheduler.schedule(now_s)
        now_s += seconds
        made = {chunk.request: 0 for chunk in step.chunks if chunk.makes_token}
        scheduler.complete(step.number, made, [0] if step.number == 2 else (), now_s=now_s)
    scheduler.schedule(now_s)
    # The mean prompt of 40 tokens takes 2 s at the 0.05 s a token of the first step, then 4 s.
    assert [state.mean_prefill_s for state in states] == [0.0, 2.0, 4.0, 4.0]


def test_larry_differs_from_its_limits():
    found = [_decisions(7, "larry", alpha=alpha) for alpha in (0.0, 5.0, 1e5)]
    assert found[0] != found[1] != found[2]


def _steps_until_long_prompt_runs(name, most, queue=20, **given_):
    """Keep the queue at a constant length with short prompts; a step takes a second."""
    limits = EngineLimits(token_budget=64, max_sequences=4, num_blocks=64, block_size=4)
    scheduler = BlockScheduler(limits, queue_order(name, **given_))
    numbers = count()
    scheduler.add(_request(next(numbers), 100, max_tokens=1))
    for now_s in range(most):
        while scheduler.num_waiting < queue:
            scheduler.add(_request(next(numbers), 10, float(now_s), max_tokens=2))
        step = scheduler.schedule(float(now_s))
        made = {chunk.request: 0 for chunk in step.chunks if chunk.makes_token}
        if step.chunks[-1].request == 0:
            return now_s
        finished = [c.request for c in step.chunks if c.makes_token and c.first >= 10]
        scheduler.complete(step.number, made, finished)
    return None


@pytest.mark.parametrize("alpha", [0.5, 2.0, 50.0])
def test_larry_serves_a_long_prompt_within_a_bounded_time_when_the_queue_is_bounded(alpha):
    # It has overtaken every newcomer after |queue| * (100 - 10) / unit / alpha seconds; those that
    # came before are served within the queue's length.
    bound_s = 20 * 90 / 10.0 / alpha + 20
    found = _steps_until_long_prompt_runs("larry", 2000, alpha=alpha, unit=10.0, unit_s=1.0)
    assert found is not None
    assert found <= bound_s


def test_shortest_prompt_first_never_serves_a_long_prompt():
    assert _steps_until_long_prompt_runs("spf", 2000) is None
    assert _steps_until_long_prompt_runs("larry", 2000, alpha=0.0) is None
