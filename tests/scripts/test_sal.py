"""SAL's evaluation: its fleets, its rules, and tables of a small run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.builders import uniform

from llmpq.routing import (
    Replica,
    ReplicaCapacity,
    ReplicaStats,
    RoutedRequest,
    WorkloadMeans,
    load_balancer,
)
from llmpq.spec.workload import draw_trace
from reproduce import sal
from reproduce.sal import ChangedSal, different_fleet, equal_fleets

pytestmark = pytest.mark.nightly

TRACE = tuple(draw_trace(400, uniform(20, 3000), uniform(5, 300), requests_per_s=3.0, seed=4))


def test_fleets_are_those_of_the_paper_and_one_of_different_servers():
    assert [len(fleet.servers) for fleet in equal_fleets()] == [8, 4]
    assert all(fleet.is_equal for fleet in equal_fleets())
    assert not different_fleet().is_equal


def test_the_larger_of_both_waits_is_sal_itself():
    capacity = ReplicaCapacity(kv_tokens=4096, token_budget=256)
    views = {}
    for number, (queued, free) in enumerate([(900, 4000), (100, 40), (0, 10), (500, 500)]):
        replica = Replica(capacity)
        replica.update(
            ReplicaStats(queued_tokens=queued, waiting_tokens=queued, free_tokens=free), 0.0
        )
        views[number] = replica.view()
    means = WorkloadMeans(prompt_tokens=300, new_tokens=50)
    for tokens in (1, 64, 700):
        request = RoutedRequest(prompt_tokens=tokens)
        assert ChangedSal(max).rank(request, views, means) == load_balancer("sal").rank(
            request, views, means
        )
    assert ChangedSal(lambda memory, _: memory).rank(request, views, means)[0] == 0


@pytest.fixture
def small(monkeypatch):
    servers = [
        replace(fleet, servers=fleet.servers[:1] + fleet.servers[-1:])
        for fleet in (equal_fleets()[0], different_fleet())
    ]
    monkeypatch.setattr(sal, "REQUESTS", 12)
    monkeypatch.setattr(sal, "SEEDS", 1)
    monkeypatch.setattr(sal, "LAWS", {"SW-Chat": "conv"})
    monkeypatch.setattr(sal, "CURVE", (1.0,))
    monkeypatch.setattr(sal, "fleets", lambda: servers)
    monkeypatch.setattr(sal, "trace_of", lambda *_: TRACE)
    return sal.collect(Path(), map)


def test_small_run_fills_every_table(small):
    (equal,), (unequal,) = small["cases"], small["unequal"]
    run = equal["runs"][0]
    assert list(run["figures"]) == list(sal.SCHEDULERS)
    assert run["curves"]["SAL"][0] == run["figures"]["LARRY"]["SAL"]
    assert 5 <= run["pressure"] <= 10
    assert list(unequal["runs"][0]["figures"]["LARRY"]) == list(sal.BALANCERS)
    text = sal.report(small)
    assert text.count("### ") == 2 + 5
    assert "Of the 20 combinations without LMetric" in text
    assert "LARRY: SAL's TTFT p95 is lower" in text


def test_picture_is_drawn(small, tmp_path):
    pictures = pytest.importorskip("reproduce.pictures", reason="needs matplotlib")
    pictures.draw_sal(small, tmp_path / "sal.png")
    assert (tmp_path / "sal.png").stat().st_size > 20_000
