"""The router in Ray Serve, without Ray: it decides as llmpq-route does."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

import pytest

pytest.importorskip("aiohttp")

from helpers.fake_replica import LOAD, FakeSession, random_load

from llmpq.errors import SpecError
from llmpq.routing import BALANCERS, RoutedRequest, load_balancer
from llmpq.server.ray.options import FleetOptions, options_of, strategy_for
from llmpq.server.ray.replica_table import RECORDED_S, ReplicaTable, RoutingHint
from llmpq.server.router.backend import Backend
from llmpq.server.router.metrics import RouterMetrics
from llmpq.server.router.proxy import Router

EVENTS = 150


def request(source):
    prefix = tuple(range(source.randrange(4)))
    return RoutedRequest(prompt_tokens=source.randrange(1, 3000), prefix=prefix)


@pytest.mark.parametrize("balancer", BALANCERS)
def test_decisions_equal_those_of_llmpq_route_on_the_same_trace(balancer):
    """Requests, ends and statistics in a random order; the same seed for both balancers."""
    names = ["a", "b", "c"]
    source = random.Random(balancer)

    async def scenario():
        session = FakeSession()
        backends = [Backend(n, f"http://{name}", session) for n, name in enumerate(names)]
        router = Router(backends, load_balancer(balancer), session, RouterMetrics(backends))
        table = ReplicaTable(load_balancer(balancer), time.monotonic)
        stats = {}
        open_ones = {}
        chosen_ones = []

        async def poll(name):
            found = session.loads[f"http://{name}"] = random_load(source, can_refuse=name == "c")
            stats[name] = {RECORDED_S: time.monotonic(), **found}
            await backends[names.index(name)].poll()

        for name in names:
            await poll(name)
        for event in range(EVENTS):
            kind = source.random()
            if kind < 0.2:
                await poll(source.choice(names))
            elif kind < 0.5 and open_ones:
                key, (name, stack) = open_ones.popitem()
                table.finished(key, name)
                stack.close()
            else:
                one = request(source)
                chosen = router._choose(one, set())
                order = table.rank(str(event), RoutingHint(request=one), stats)
                assert order[0] == names[chosen.number]
                router._balancer.routed(one, chosen.number)
                stack = contextlib.ExitStack()
                stack.enter_context(chosen.attempt(one, asyncio.Timeout(None)))
                open_ones[str(event)] = (order[0], stack)
                chosen_ones.append(order[0])
        assert set(chosen_ones) == set(names)
        found = [view.outstanding for view in table.views().values()]
        assert found == [one.outstanding for one in backends]

    asyncio.run(scenario())


def stats_of(**changes):
    return {RECORDED_S: time.time(), **LOAD, **changes}


def table_of(balancer="least_loaded"):
    return ReplicaTable(load_balancer(balancer))


HINT = RoutingHint(request=RoutedRequest(prompt_tokens=100))


def test_replicas_that_refused_come_last_and_those_that_take_nothing_before_them():
    table = table_of()
    stats = {"a": stats_of(), "b": stats_of(is_ready=False), "c": stats_of()}
    assert table.rank("1", HINT, stats) == ["a", "c", "b"]
    assert table.rank("2", RoutingHint(request=HINT.request, tried=("c",)), stats)[-1] == "c"
    hint = RoutingHint(request=HINT.request, tried=("a", "b", "c"))
    assert table.rank("3", hint, stats) == ["a", "b", "c"]


def test_a_request_is_counted_where_it_is_until_its_end():
    table = table_of()
    stats = {"a": stats_of(), "b": stats_of()}
    assert table.rank("1", HINT, stats) == ["a", "b"]
    assert table.rank("1", HINT, stats) == ["b", "a"]  # ties go to the one with fewer tokens
    table.routed("1", HINT.request, "a")
    assert {name: view.outstanding for name, view in table.views().items()} == {"a": 1, "b": 0}
    table.finished("1", "b")  # an earlier attempt
    table.finished("1", "a")
    table.finished("1", "a")
    assert {view.outstanding for view in table.views().values()} == {0}


def test_a_request_that_has_ended_is_not_counted_again():
    table = table_of()
    order = table.rank("1", HINT, {"a": stats_of(), "b": stats_of()})
    table.finished("1", order[0])
    for name in order:
        table.routed("1", HINT.request, name)
    assert {view.outstanding for view in table.views().values()} == {0}
    order = table.rank("2", HINT, {"a": stats_of(), "b": stats_of()})
    table.finished("2", order[1])  # sent to the second one
    table.routed("2", HINT.request, order[1])
    assert {view.outstanding for view in table.views().values()} == {0}


def test_replicas_come_and_go():
    table = table_of()
    assert table.rank("1", HINT, {}) == []
    assert table.rank("1", HINT, {"a": {}, "b": {}}) == ["a", "b"]
    assert table.rank("2", HINT, {"b": {}}) == ["b"]
    table.finished("1", "a")
    assert list(table.views()) == ["b"]


@pytest.mark.parametrize(
    "changes", [{"kv_tokens": 0}, {RECORDED_S: "now"}, {"queued_tokens": None}]
)
def test_malformed_statistics_leave_what_was_known(changes):
    table = table_of()
    table.rank("1", HINT, {"a": stats_of(queued_tokens=50)})
    before = table.views()
    table.forget("1")
    table.rank("1", HINT, {"a": stats_of(queued_tokens=70) | changes})
    assert table.views()["a"].capacity == before["a"].capacity
    assert table.views()["a"].queued_tokens == 50 + 2 * HINT.request.prompt_tokens


def test_a_node_gets_the_strategy_of_its_label():
    options = FleetOptions(strategies={"T4": "t4.json", "V100": "v100.json"})
    assert strategy_for(options, {"ray.io/accelerator-type": "V100"}) == "v100.json"
    with pytest.raises(SpecError, match=r"found None, expected one of T4, V100"):
        strategy_for(options, {})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "args: field 'strategies': found nothing"),
        ({"strategies": {}}, "args: field 'strategies': found {}"),
        ({"strategies": {"a": 3}}, r"args: field 'strategies.a': found 3"),
        ({"strategies": {"a": "b"}, "replicas": 2}, "args: field 'replicas': found a field"),
        ({"strategies": {"a": "b"}, "num_replicas": 0}, "'num_replicas': found 0"),
        ({"strategies": {"a": "b"}, "poll_s": 0}, "'poll_s': found 0"),
        ({"strategies": {"a": "b"}, "balancer": "best"}, "'balancer': found best"),
        (
            {"strategies": {"a": "b"}, "engine": {"gpu": 1}},
            "'engine': found keyword 'gpu', expected one of alpha, ",
        ),
        ({"strategies": {"a": "b"}, "engine": {"scheduler": "x"}}, "'engine.scheduler': found x"),
        ({"strategies": {"a": "b"}, "engine": {"scheduler": "trail"}}, "'engine.scheduler'"),
        (
            {"strategies": {"a": "b"}, "engine": {"token_budget": "many"}},
            "'engine.token_budget': found many, expected a whole number",
        ),
        ({"strategies": {"a": "b"}, "engine": {"step_timeout_s": 0}}, "'engine.step_timeout_s'"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(args, message):
    with pytest.raises(SpecError, match=message):
        options_of(args)
