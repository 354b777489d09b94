"""Load balancers, and what a router tracks of a replica."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmpq.errors import SpecError
from llmpq.routing import (
    BALANCERS,
    Replica,
    ReplicaCapacity,
    ReplicaStats,
    ReplicaView,
    RoutedRequest,
    WorkloadMeans,
    load_balancer,
)
from llmpq.routing.balancers import _steps, freed_tokens

MEANS = WorkloadMeans(prompt_tokens=100.0, new_tokens=50.0)
CAPACITY = ReplicaCapacity(kv_tokens=1000, token_budget=100)


def view(queued=0, free=1000, requests=0, outstanding=0, capacity=CAPACITY):
    return ReplicaView(capacity, queued, free - queued, requests, outstanding)


views = st.builds(
    view,
    queued=st.integers(0, 5000),
    free=st.integers(0, 1000),
    requests=st.integers(0, 50),
    outstanding=st.integers(0, 50),
    capacity=st.builds(
        ReplicaCapacity,
        kv_tokens=st.integers(1000, 9000),
        token_budget=st.integers(1, 999),
        prefill_step_s=st.floats(0.01, 9),
        decode_step_s=st.floats(0.01, 9),
    ),
)
requests = st.builds(
    RoutedRequest,
    prompt_tokens=st.integers(1, 4000),
    prefix=st.lists(st.integers(), max_size=4).map(tuple),
)


@pytest.mark.parametrize("name", BALANCERS)
@given(
    replicas=st.dictionaries(st.integers(0, 9), views, min_size=1),
    sent=st.lists(requests, min_size=1, max_size=5),
)
def test_every_replica_is_ranked_once(name, replicas, sent):
    balancer = load_balancer(name, seed=1)
    for request in sent:
        ranked = balancer.rank(request, replicas, MEANS)
        assert sorted(ranked) == sorted(replicas)
        balancer.routed(request, ranked[0])


EQUAL = ReplicaCapacity(kv_tokens=5000, token_budget=256, prefill_step_s=0.25, decode_step_s=0.25)


def ranks_on_equal_replicas(replicas, request, *names):
    equal = {number: item._replace(capacity=EQUAL) for number, item in enumerate(replicas)}
    return [load_balancer(name).rank(request, equal, MEANS) for name in names]


@given(st.lists(views, min_size=1, max_size=6), requests, st.integers(0, 50))
def test_sal_in_seconds_equals_sal_with_as_many_requests(replicas, request, count):
    replicas = [item._replace(requests=count) for item in replicas]
    one, other = ranks_on_equal_replicas(replicas, request, "sal", "sal_seconds")
    assert one == other


@given(st.lists(views, min_size=1, max_size=6), requests)
def test_sal_in_seconds_equals_lmetric_where_memory_is_free(replicas, request):
    replicas = [item._replace(free_tokens=request.prompt_tokens) for item in replicas]
    one, other = ranks_on_equal_replicas(replicas, request, "lmetric", "sal_seconds")
    assert one == other


def test_sal_waits_for_memory_or_for_the_queue():
    balancer, request = load_balancer("sal"), RoutedRequest(prompt_tokens=200)
    # R = 1000 / 125 * 150 / 50 = 24 tokens a step.
    assert freed_tokens(1000, MEANS) == 24.0
    waits_for_memory = view(free=104)  # (200 - 104) / 24 = 4 steps
    waits_for_queue = view(queued=150)  # (150 + 200) / 100 = 3.5 steps
    both = {0: waits_for_memory, 1: waits_for_queue}
    assert balancer.rank(request, both, MEANS) == [1, 0]
    both[1] = view(queued=250)  # 4.5 steps
    assert balancer.rank(request, both, MEANS) == [0, 1]


def test_sal_in_seconds_prefers_the_faster_of_two_empty_replicas():
    fast = ReplicaCapacity(kv_tokens=1000, token_budget=100, prefill_step_s=0.1)
    replicas = {0: view(), 1: view(capacity=fast)}
    request = RoutedRequest(prompt_tokens=100)
    assert load_balancer("sal").rank(request, replicas, MEANS) == [0, 1]
    assert load_balancer("sal_seconds").rank(request, replicas, MEANS) == [1, 0]


def test_equal_scores_go_to_the_replica_with_less_memory_in_use():
    replicas = {0: view(free=300), 1: view(free=600), 2: view(free=600)}
    request = RoutedRequest(prompt_tokens=10)
    for name in ("least_loaded", "sal"):
        assert load_balancer(name).rank(request, replicas, MEANS) == [1, 2, 0]


def test_round_robin_takes_replicas_in_turn_and_skips_those_that_are_out():
    balancer, request = load_balancer("round_robin"), RoutedRequest(prompt_tokens=1)
    taken = []
    for step in range(8):
        replicas = {number: view() for number in range(4) if step < 5 or number != 2}
        taken.append(balancer.rank(request, replicas, MEANS)[0])
        balancer.routed(request, taken[-1])
    assert taken == [0, 1, 2, 3, 0, 1, 3, 0]


def test_two_choices_never_takes_the_most_loaded_replica():
    balancer, request = load_balancer("p2c", seed=3), RoutedRequest(prompt_tokens=1)
    replicas = {number: view(outstanding=number) for number in range(4)}
    taken = {balancer.rank(request, replicas, MEANS)[0] for _ in range(200)}
    assert taken == {0, 1, 2}


def test_lmetric_multiplies_queued_tokens_and_requests():
    replicas = {0: view(queued=100, requests=1), 1: view(queued=10, requests=4)}
    # 0: (100 + 10) * 2 = 220; 1: (10 + 10) * 5 = 100
    assert load_balancer("lmetric").rank(RoutedRequest(prompt_tokens=10), replicas, MEANS)[0] == 1


def test_prefix_affinity_returns_to_the_replica_with_the_longest_prefix():
    balancer = load_balancer("prefix")
    balancer.routed(RoutedRequest(prompt_tokens=30, prefix=(1, 2)), 0)
    balancer.routed(RoutedRequest(prompt_tokens=30, prefix=(1, 2, 3)), 1)
    request = RoutedRequest(prompt_tokens=40, prefix=(1, 2, 3, 4))
    replicas = {0: view(), 1: view(outstanding=8)}
    assert balancer.rank(request, replicas, MEANS) == [1, 0]
    replicas[1] = view(outstanding=9)  # too many more than the other
    assert balancer.rank(request, replicas, MEANS) == [0, 1]


def test_random_choices_depend_on_the_seed_alone():
    request, replicas = RoutedRequest(prompt_tokens=1), {number: view() for number in range(5)}

    def taken(seed):
        balancer = load_balancer("random", seed=seed)
        return [balancer.rank(request, replicas, MEANS) for _ in range(20)]

    assert taken(1) == taken(1) != taken(2)


def test_an_unknown_balancer_is_an_error():
    with pytest.raises(SpecError, match=r"balancer: found 'fair', expected one of random, "):
        load_balancer("fair")


@pytest.mark.parametrize("field", ["kv_tokens", "token_budget", "prefill_step_s", "decode_step_s"])
def test_a_capacity_of_nothing_is_an_error(field):
    values = {"kv_tokens": 1, "token_budget": 1} | {field: 0}
    with pytest.raises(SpecError, match=f"field '{field}': found 0, expected more than 0"):
        ReplicaCapacity(**values)


def test_statistics_replace_only_what_was_routed_before_they_were_asked_for():
    replica = Replica(CAPACITY)
    for second, tokens in enumerate((10, 20, 40)):
        replica.route(RoutedRequest(prompt_tokens=tokens), float(second))
    assert replica.view() == ReplicaView(CAPACITY, 70, 930, 3, 3)
    stats = ReplicaStats(queued_tokens=5, waiting_tokens=5, free_tokens=900, running=2)
    replica.update(stats, asked_s=1.0)
    assert replica.view() == ReplicaView(CAPACITY, 65, 835, 4, 3)
    replica.finish()
    assert replica.view().outstanding == 2


def test_the_memory_of_a_running_prompt_is_subtracted_once():
    replica = Replica(CAPACITY)
    # A prompt of 600 tokens has its blocks, 500 of them are not computed; one of 50 waits.
    replica.update(ReplicaStats(queued_tokens=550, waiting_tokens=50, free_tokens=400), 0.0)
    assert (replica.view().queued_tokens, replica.view().free_tokens) == (550, 350)
    assert replica.kv_cache_usage == pytest.approx(0.6)
    idle = view(queued=550, free=1000)  # waits for no memory either
    request = RoutedRequest(prompt_tokens=350)
    assert load_balancer("sal").rank(request, {0: replica.view(), 1: idle}, MEANS) == [1, 0]
    (memory, compute), _ = (_steps(request, one, MEANS) for one in (replica.view(), idle))
    assert (memory, compute) == (0.0, 9.0)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 500)), max_size=30))
def test_what_was_routed_is_counted_once(steps):
    """Against a sum over all requests."""
    replica, sent, asked_s = Replica(CAPACITY), [], -1.0
    for second, (is_poll, tokens) in enumerate(steps):
        if is_poll:
            asked_s = second - random.Random(tokens).random()
            replica.update(ReplicaStats(free_tokens=1000), asked_s)
        else:
            replica.route(RoutedRequest(prompt_tokens=tokens), float(second))
            sent.append((second, tokens))
        since = [tokens for at, tokens in sent if at >= asked_s]
        assert replica.view() == ReplicaView(
            CAPACITY, sum(since), 1000 - sum(since), len(since), len(sent)
        )
