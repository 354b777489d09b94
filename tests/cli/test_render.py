"""Plans as text, JSON and pictures."""

from __future__ import annotations

import importlib.util

import pytest
from helpers.builders import cluster_of, plan_request

from llmpq.assigner import make_plan
from llmpq.assigner.explain.compare import Outcome
from llmpq.assigner.explain.pareto import pareto_plans
from llmpq.assigner.request import costs_of
from llmpq.assigner.schedules.plan import ScheduleRequest, with_schedule
from llmpq.cli.plots import draw_front
from llmpq.cli.render import (
    compact_bits,
    comparison_table,
    format_text,
    front_table,
    memory_pair,
    plan_record,
    plan_table,
)
from llmpq.errors import InfeasibleError
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.lengths import constant
from llmpq.spec.plan import read_plan, write_plan

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("used", "capacity", "text"),
    [
        (int(0.36 * GIB), int(0.41 * GIB), "369 of 420 MiB"),
        (int(1.6 * GIB), 2 * GIB, "1638 of 2048 MiB"),
        (10 * MIB, 16 * GIB, "0.0 of 16.0 GiB"),
        (int(13.44 * GIB), 16 * GIB, "13.4 of 16.0 GiB"),
        (5 * GIB, 2 * GIB, "5.0 of 2.0 GiB"),
    ],
)
def test_memory_pair_uses_the_unit_of_the_larger_size(used, capacity, text) -> None:
    assert memory_pair(used, capacity) == text


def test_compact_bits_counts_widest_first() -> None:
    assert compact_bits((4, 16, 8, 4)) == "1x16 1x8 2x4"
    assert compact_bits(()) == "-"


def test_plan_table_shows_small_memory_in_mib() -> None:
    plan = make_plan(plan_request())
    text = plan_table(plan, {})
    stage = plan.estimate.stages[0]
    assert f"{stage.memory.total / MIB:.0f} of {stage.capacity_bytes / MIB:.0f} MiB" in text


@pytest.mark.parametrize(
    ("has", "limit", "shown"),
    [
        ("avx2", None, "AVX2, 4.00 GiB; 16 bits are bfloat16 stored, float32 computed"),
        ("amx", "avx2", "AVX2, 4.00 GiB; 16 bits are bfloat16 stored, float32 computed"),
        ("amx", None, "AMX, 4.00 GiB"),
    ],
)
def test_a_plan_states_the_cpu_and_what_16_bits_mean_on_it(tmp_path, has, limit, shown) -> None:
    group = DeviceGroup(
        type="cpu", count=1, threads=2, memory_bytes=4 * GIB, instruction_set=has, cpu_isa=limit
    )
    cluster = Cluster(name="c", nodes=(Node(name="desk", devices=(group,)),))
    plan = make_plan(plan_request(cluster=cluster, dtype="bfloat16"), command="test")
    assert f"cpu            desk/cpu: 2 threads, {shown}" in format_text(plan)
    write_plan(tmp_path / "plan.json", plan)
    assert read_plan(tmp_path / "plan.json").cluster == cluster


def test_plan_table_shows_the_phase_of_split_stages() -> None:
    request = plan_request(cluster=cluster_of(("V100-32G", 1, 900), ("T4-16G", 1, 900)))
    plan = make_plan(request)
    assert "phase" not in plan_table(plan, {}).splitlines()[2].split()
    laws = ScheduleRequest(
        prompt_tokens=constant(request.workload.prompt_tokens),
        new_tokens=constant(request.workload.new_tokens),
    )
    split = with_schedule(plan, costs_of(request, plan.cluster), laws, "waa")
    head, *rows = plan_table(split, {}).splitlines()[2 : 3 + len(split.stages)]
    assert head.split()[:3] == ["rank", "device", "phase"]
    found = [row.split()[2] for row in rows]
    assert found == [stage.phase.value for stage in split.stages]
    assert set(found) == {"prefill", "decode"}
    assert [one["phase"] for one in plan_record(split, None)["stages"]] == found


def test_front_table_has_one_row_per_plan() -> None:
    plans = pareto_plans(plan_request(), 3)
    paths = [f"p{number}.json" for number in range(len(plans))]
    lines = front_table(plans, paths).splitlines()
    assert [line.split()[-1] for line in lines[3:]] == paths
    assert lines[2].split()[0] == "plan"


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs matplotlib")
def test_draw_front_draws_fronts_of_any_size(tmp_path) -> None:
    several = pareto_plans(plan_request(), 4)
    lossless = make_plan(plan_request(cluster=cluster_of(("V100-32G", 1, 4000)), theta_s=1e4))
    assert lossless.estimate.quality == 0
    for number, plans in enumerate((several, several[:1], (lossless,))):
        path = tmp_path / "new" / f"{number}.png"
        draw_front(plans, path)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_comparison_table_is_sorted_by_objective() -> None:
    request = plan_request()
    best, even = make_plan(request), make_plan(request, "uniform")
    assert best.estimate.objective_s < even.estimate.objective_s
    text = comparison_table(
        [
            Outcome(method="fastest", plan=None, error=InfeasibleError("no device is large")),
            Outcome(method="uniform", plan=even),
            Outcome(method="llmpq", plan=best),
        ]
    )
    head, first, second, gap, reason = text.split("\n")
    assert head.split()[:2] == ["method", "objective"]
    assert first.startswith("llmpq ")
    assert f"{best.estimate.objective_s:.4g} s (+0.0%)" in first
    more = even.estimate.objective_s / best.estimate.objective_s - 1
    assert f"{even.estimate.objective_s:.4g} s (+{more:.1%})" in second
    assert head.index("latency") == first.index(f"{best.estimate.latency_s:.4g} s  ")
    assert gap == ""
    assert reason == "fastest: no plan: no device is large"


def test_comparison_table_without_plans_has_only_reasons() -> None:
    outcome = Outcome(method="llmpq", plan=None, error=InfeasibleError("too large"))
    assert comparison_table([outcome]) == "llmpq: no plan: too large"
