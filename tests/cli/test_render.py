"""Plans as text, JSON and pictures."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
from helpers import ranks
from helpers.builders import cluster_of, plan_request

from llmpq.assigner import make_plan
from llmpq.assigner.explain.compare import Outcome, pareto_plans
from llmpq.assigner.request import costs_of
from llmpq.assigner.schedules.plan import ScheduleRequest, with_schedule
from llmpq.cli.plots import draw_front
from llmpq.cli.render import (
    compact_bits,
    comparison_table,
    format_text,
    front_table,
    long_seconds,
    memory_pair,
    plan_record,
    plan_table,
    speed_cells,
    speed_heads,
)
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.plan import read_plan, write_plan
from llmpq.spec.tables import SensitivityTable
from llmpq.spec.workload import Workload, constant
from llmpq.units import format_number, format_seconds

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


def test_workers_of_one_host_that_differ_are_named_apart() -> None:
    def told(*limits: str | None) -> list[str]:
        groups = tuple(
            DeviceGroup(
                type="cpu", count=1, threads=1, memory_bytes=GIB, instruction_set="amx", cpu_isa=isa
            )
            for isa in limits
        )
        cluster = Cluster(name="c", nodes=(Node(name="desk", devices=groups),))
        plan = ranks.make_plan((0, 1, 3), cluster=cluster)
        return [line.split(":")[0] for line in format_text(plan) if line.startswith("cpu ")]

    assert told(None, None) == ["cpu            desk/cpu"]
    assert told(None, "avx2") == ["cpu            desk/cpu#0", "cpu            desk/cpu#1"]


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


def test_speed_is_the_first_token_one_answer_and_all_of_them() -> None:
    plan = make_plan(plan_request())
    round_s, batch = plan.decode_round_s, plan.workload.batch
    record = plan_record(plan, None)
    assert record["answer_tokens_per_s"] == pytest.approx(1 / round_s)
    assert record["decode_tokens_per_s"] == pytest.approx(batch / round_s)
    stages = plan.estimate.stages
    first_s = sum(stage.prefill_s + stage.send_prefill_s for stage in stages)
    assert record["time_to_first_token_s"] == pytest.approx(first_s)
    each, every = format_number(1 / round_s), format_number(batch / round_s)
    line = f"one answer {each} tokens/s, all {batch} together {every}"
    assert line in plan_table(plan, {})
    assert speed_heads(plan.workload) == ("first token", "tokens/s each", f"tokens/s all {batch}")
    assert speed_cells(plan) == (format_seconds(first_s), each, every)


def test_speed_of_one_sequence_and_of_one_token_each() -> None:
    alone = make_plan(plan_request(workload=Workload(batch=1, prompt_tokens=64, new_tokens=4)))
    assert len(speed_cells(alone)) == len(speed_heads(alone.workload)) == 2
    assert "together" not in alone.speed_text()
    short = make_plan(plan_request(workload=Workload(batch=4, prompt_tokens=64, new_tokens=1)))
    assert short.answer_tokens_per_s is None
    assert speed_cells(short)[1:] == ("-", "-")
    assert "answer" not in short.speed_text()


def test_quality_is_a_divergence_where_the_table_knows_its_unit() -> None:
    layers = plan_request().model.num_layers
    omega = tuple(
        (bits, (share / layers,) * layers) for bits, share in ((3, 4.0), (4, 1.0), (8, 0.1))
    )
    known = SensitivityTable(
        model="m", method="divergence", omega=omega, provenance=(("unit_nats", "0.02"),)
    )
    plan = make_plan(plan_request(sensitivity=known, bits=(4,)))
    assert plan.divergence_nats == pytest.approx(0.02)
    assert "about 0.02 nats of KL divergence" in plan_table(plan, {})
    assert "about 0.02 nats" in plan.summary()
    assert plan_record(plan, None)["divergence_nats"] == pytest.approx(0.02)
    assert front_table([plan], ["p.json"]).splitlines()[2].split()[3:5] == ["KL,", "nats"]
    plain = make_plan(plan_request(sensitivity=replace(known, provenance=()), bits=(4,)))
    assert plain.divergence_nats is None
    assert "nats" not in plan_table(plain, {})
    wrong = replace(known, provenance=(("unit_nats", "much"),))
    with pytest.raises(SpecError, match="unit_nats"):
        make_plan(plan_request(sensitivity=wrong, bits=(4,)))


@pytest.mark.parametrize(("seconds", "text"), [(28.546, "28.55 s"), (24_690.4, "24,690 s")])
def test_long_times_have_no_exponent(seconds, text) -> None:
    assert long_seconds(seconds) == text


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
