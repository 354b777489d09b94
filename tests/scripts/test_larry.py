"""LARRY's evaluation: its servers, its requests, and tables of a small run."""

from dataclasses import replace

import pytest
from helpers.builders import uniform

from llmpq.batching.engine_step import ScheduledChunk
from llmpq.batching.queue_order import queue_order
from llmpq.sim.costs import step_size
from llmpq.spec.workload import draw_trace
from reproduce import larry
from reproduce.larry import a100_server, draw_requests, h100_server

pytestmark = pytest.mark.nightly

TRACE = draw_trace(400, uniform(20, 3000), uniform(5, 300), requests_per_s=3.0, seed=4)


def _seconds(server, *chunks):
    shape = step_size([ScheduledChunk(0, first, count, (), True) for first, count in chunks])
    return server.costs.stage_s(0, shape)


@pytest.mark.parametrize("server", [a100_server(), h100_server()], ids=["8B", "70B"])
def test_server_holds_what_its_memory_allows(server):
    # 16 GB of weights in 40 GB leave 160 thousand tokens; 70 GB in 160 GB leave 240 thousand.
    assert 130_000 < 16 * server.num_blocks < 270_000
    # Two times the parameters in operations for each of 1,024 tokens bound a step from below.
    assert 0.05 < _seconds(server, (0, 1024)) < 0.15
    assert 0.01 < _seconds(server, (1000, 1)) < _seconds(server, *[(1000, 1)] * 64) < 0.05


@pytest.mark.parametrize("arrivals", ["two_state", "poisson", "gamma", "trace"])
def test_requests_arrive_at_one_a_second_and_depend_on_the_seed(arrivals):
    requests = draw_requests(TRACE, 300, 1, arrivals)
    assert len(requests) / requests[-1].arrival_s == pytest.approx(1.0, rel=0.35)
    assert requests == draw_requests(TRACE, 300, 1, arrivals)
    assert requests != draw_requests(TRACE, 300, 2, arrivals)


def test_rate_of_pressure_multiplies_the_unloaded_time(monkeypatch):
    monkeypatch.setattr(larry, "REQUESTS", 80)
    case = larry.make_case(a100_server(), "SW-Chat", TRACE, 0)
    ratio = larry.p95(case.play(queue_order("fcfs"), case.rate)) / case.unloaded_s
    assert 5 <= ratio <= 10
    assert ratio == case.pressure(case.rate)


def test_small_run_fills_every_table(monkeypatch):
    monkeypatch.setattr(larry, "REQUESTS", 25)
    monkeypatch.setattr(larry, "SEEDS", 1)
    monkeypatch.setattr(larry, "ALPHAS", (0.0, 1e5))
    monkeypatch.setattr(larry, "CURVE", (1.0, 1.2))
    monkeypatch.setattr(larry, "LAWS", {"SW-Chat": "conv"})
    choices = larry.choices
    monkeypatch.setattr(larry, "choices", lambda found: dict(list(choices(found).items())[:2]))
    monkeypatch.setattr(larry, "CURVE_SEEDS", 1)
    monkeypatch.setattr(larry, "h100_server", lambda: replace(a100_server(), name="other"))
    monkeypatch.setattr(larry, "load_trace", lambda _: TRACE)
    record = larry.collect(larry.Path())
    for entry in record["cases"]:
        assert entry["alphas"]["0.0"] == entry["orders"]["SPF"]
        assert entry["alphas"]["100000.0"] == entry["orders"]["FCFS"]
        assert entry["curves"]["LARRY"][0] == entry["orders"]["LARRY"][:1]
    text = larry.report(record)
    assert text.count("### ") == len(record["cases"]) + 5
    assert "LARRY's TTFT p50 below that of" in text


def test_capacity_lies_between_the_points_of_a_curve():
    curve = [[{larry.METRICS[0]: {"p95": value}}] for value in (1.0, 4.0, 16.0)]
    assert larry.capacity((1.0, 2.0, 3.0), curve, 2.0) == pytest.approx(1.5)
    assert larry.capacity((1.0, 2.0, 3.0), curve, 4.0) == pytest.approx(2.0)
    assert larry.capacity((1.0, 2.0, 3.0), curve, 0.5) == "less than 1 of the rate"
    assert larry.capacity((1.0, 2.0, 3.0), curve, 99.0) == "more than 3 of the rate"


def test_an_alpha_is_counted_only_where_it_is_below_at_every_place():
    def run(*seconds):
        return {larry.METRICS[0]: dict(zip(("p50", "p95", "p99"), seconds, strict=True))}

    rivals = {"FCFS": [run(2, 4, 6)] * 3, "TRAIL+": [run(2, 3, 9)] * 3}
    ours = [run(1, 2, 5), run(1, 3, 5), run(1, 2, 7)]
    record = {"cases": [{"orders": rivals, "alphas": {"1.0": ours}}]}
    assert larry.alpha_claims(record, "1.0") == [(True, True), (True, False), (False, True)]
