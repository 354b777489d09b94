"""The dynamic scheduler: planned stages in the planned order, and the paper's rules otherwise."""

from __future__ import annotations

import random

from helpers.schedules import CLUSTER, T, V, app_of, pair, schedule_of
from hypothesis import given
from hypothesis import strategies as st

from llmpq.multillm.dynamic import DynamicScheduler
from llmpq.multillm.schedule import ScheduledModel


def scheduler_of(names: str, *stages: list[ScheduledModel], finished=()) -> DynamicScheduler:
    app = app_of(names)
    return DynamicScheduler(app, schedule_of(app, *stages), CLUSTER, finished)


def on(change) -> dict[str, list[str]]:
    """Devices that are started, by model."""
    found: dict[str, list[str]] = {}
    for model, replica in change.start:
        found.setdefault(model, []).extend(replica.devices)
    return found


def stopped(change) -> list[str]:
    return sorted(model for model, _ in change.stop)


def test_the_planned_order_runs_the_planned_stages():
    plan = scheduler_of(
        "abc",
        [pair("a T0"), pair("b T1")],
        [pair("b T0 T1"), pair("c T2")],
        [pair("c T0 T1")],
    )
    assert on(plan.begin()) == {"A": [T[0]], "B": [T[1]]}
    second = plan.finish("a")
    # b goes on where its weights are, and gets a second replica; a's devices are free.
    assert (on(second), stopped(second)) == ({"B": [T[0]], "C": [T[2]]}, ["A"])
    assert second.nodes == {"B": ("b",), "C": ("c",)}
    third = plan.finish("b")
    # c keeps the replica that it has, on another device of the group than the schedule's.
    assert (on(third), stopped(third)) == ({"C": [T[1]]}, ["B", "B"])
    last = plan.finish("c")
    assert (on(last), stopped(last), plan.running) == ({}, ["C", "C"], {})


def test_a_model_in_its_last_stage_goes_on_when_another_finishes_first():
    plan = scheduler_of(
        "abc", [pair("a T0"), pair("b T1")], [pair("b V0"), pair("c T0")], [pair("c V0")]
    )
    plan.begin()
    change = plan.finish("b")  # a was to finish first, and has no later stage
    # Stage 2 has b finished and c, whose device a has: another of the group is free.
    assert (on(change), stopped(change)) == ({"C": [V[0]]}, ["B"])
    assert plan.stage == 2
    assert set(plan.running) == {"A", "C"}


def test_an_unfinished_model_makes_room_for_those_of_the_next_stage():
    plan = scheduler_of(
        "abc",
        [pair("a V0"), pair("b V1")],
        [pair("c V0 V1")],
        [pair("b T0")],
    )
    plan.begin()
    change = plan.finish("a")  # b has a later stage, and c needs its device
    assert (on(change), stopped(change)) == ({"C": [V[0], V[1]]}, ["A", "B"])
    change = plan.finish("c")
    assert (on(change), stopped(change)) == ({"B": [T[0]]}, ["C", "C"])


def test_an_unfinished_model_goes_on_where_devices_are_left():
    plan = scheduler_of("abc", [pair("a V0"), pair("b V1")], [pair("c V0")], [pair("b T0")])
    plan.begin()
    change = plan.finish("a")
    assert (on(change), stopped(change)) == ({"C": [V[0]]}, ["A"])
    assert set(plan.running) == {"B", "C"}


def test_no_stage_is_considered_before_all_models_of_the_last_are_placed():
    plan = scheduler_of(
        "abcd",
        [pair("a V0"), pair("b V1")],
        [pair("b T0"), pair("c V0 V1", tp=2)],
        [pair("d T1"), pair("c T2 T3", tp=2)],
    )
    plan.begin()
    change = plan.finish("b")  # c needs a's device: it waits, and d waits for c
    assert (on(change), stopped(change)) == ({}, ["B"])
    change = plan.finish("a")
    # c of stage 2 could be placed now; b, also of stage 2, is finished: stage 3 follows at once.
    assert on(change) == {"D": [T[1]], "C": [T[2], T[3]]}


def test_a_resumed_run_starts_with_what_is_unfinished():
    plan = scheduler_of(
        "abc", [pair("a V0"), pair("b V1")], [pair("b V0 V1")], [pair("c T0")], finished="ab"
    )
    change = plan.begin()
    assert (on(change), plan.stage) == ({"C": [T[0]]}, 2)


def test_a_stalled_run_starts_the_producers_first():
    """A schedule that stops a producer whose consumer then waits for it."""
    stages = [pair("a V0"), pair("b V1")], [pair("b V0 V1")], [pair("a V0 V1")]
    plan = scheduler_of("ab", *map(list, stages))
    plan.begin()
    plan.stage, plan.running = 1, {"B": pair("b V0 V1")}
    assert set(plan.stalled().nodes) == {"A"}
    assert set(plan.finish("a").nodes) == {"B"}


def random_stages(chance: random.Random) -> tuple[str, list[list[ScheduledModel]]]:
    names = "abcdef"[: chance.randint(1, 6)]
    stages, left = [], list(names)
    while left:
        free = [*(f"T{number}" for number in range(4)), "V0", "V1"]
        models = []
        for name in chance.sample(left, len(left)):
            count = chance.randint(0, 2)
            if 0 < count <= len(free):
                devices, free = free[:count], free[count:]
                models.append(pair(f"{name} {' '.join(devices)}"))
        if models:
            stages.append(models)
            left.remove(chance.choice(models).nodes[0])
    return names, stages


@given(st.integers(0, 10**6))
def test_every_model_is_finished_in_any_order(seed):
    chance = random.Random(seed)
    names, stages = random_stages(chance)
    plan = scheduler_of(names, *stages)
    loaded: dict = {}
    change = plan.begin()
    finished: set[str] = set()
    while True:
        for one in change.stop:
            assert loaded.pop(one[1].devices) == one
        for one in change.start:
            assert all(not set(one[1].devices) & set(other) for other in loaded)
            loaded[one[1].devices] = one
        assert {name for name, _ in loaded.values()} == set(change.nodes)
        if finished == set(names):
            break
        nodes = sorted(node for found in change.nodes.values() for node in found)
        assert nodes  # nothing waits for an order of the clock
        assert not set(nodes) <= finished
        name = chance.choice([node for node in nodes if node not in finished])
        finished.add(name)
        change = plan.finish(name)
    assert not loaded
