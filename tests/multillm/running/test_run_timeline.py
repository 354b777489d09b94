"""Measured times of a run: idle devices, stages, and the time that is left."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.schedules import app_of, pair, schedule_of

from llmpq.multillm.running.timeline import Timeline, build_report, time_left_s
from llmpq.multillm.schedule import ModelReplica

ONE = ModelReplica(devices=("d0",), tensor_parallel=1)
TWO = ModelReplica(devices=("d1", "d2"), tensor_parallel=2)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_idle_devices_have_no_model_or_no_request():
    clock = Clock()
    found = Timeline(clock)

    def at(seconds: float) -> float:
        clock.now = 100 + seconds
        return seconds

    found.begin_stage(0, {"A": [ONE]})
    first = found.begin_replica("A", ONE)
    first.ready_s = at(2)
    first.begin_request(at(2))
    first.begin_request(at(3))
    at(4)
    found.finish_request(first, "a", 7)
    at(5)
    found.finish_request(first, "a", 1)
    found.begin_stage(1, {"B": [TWO]})
    first.stop_s, first.end_s = 5, 6
    second = found.begin_replica("B", TWO)
    second.ready_s = 7
    second.begin_request(7)
    second.end_request(at(9), None)  # taken back
    at(10)
    found.end()
    # d0: loads 0-2, answers 2-5, ends 5-6, nothing 6-10; d1, d2: nothing 0-5, idle 9-10.
    assert found.idle_s(3) == pytest.approx(4 + 2 * (5 + 1))
    assert (found.makespan_s, found.tokens) == (10, 8)
    report = build_report(
        schedule_of(app_of("a"), [pair("a T0")]), found, num_devices=3, requests={"a": 2}, errors={}
    )
    assert [stage["end_s"] for stage in report["stages"]] == [5, 10]
    assert report["stages"][0]["models"] == [
        {"model": "A", "plan": "tp1", "devices": ["d0"], "requests": 2, "nodes": {"a": 2}}
    ]
    assert report["makespan_s"] == {"predicted": 1, "measured": 10}
    assert [one["load_s"] for one in report["replicas"]] == [2, 2]


def test_the_time_that_is_left_is_that_of_the_slowest_node():
    def counted(text: str, requests: int):
        one = pair(text)
        return replace(one, requests=((one.nodes[0], requests),))

    schedule = schedule_of(
        app_of("ab"),
        [counted("a T0", 4), counted("b T1", 6)],
        [counted("b T1", 2)],
    )
    assert time_left_s(schedule, {"a": 0, "b": 0}) == 2
    assert time_left_s(schedule, {"a": 4, "b": 3}) == 1.5
    assert time_left_s(schedule, {"a": 2, "b": 7}) == 0.5
    assert time_left_s(schedule, {"a": 3, "b": 8}) == 0.25
    assert time_left_s(schedule, {"a": 4, "b": 8}) == 0
    assert time_left_s(schedule, {"a": 9, "b": 9}) == 0
