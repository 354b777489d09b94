"""The report has exactly the promised fields, and says what it compares."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from helpers.draft_plans import with_draft
from helpers.ranks import make_plan

from llmpq.batching import RequestRecord
from llmpq.cli.plots import draw_run, run_groups
from llmpq.dist.metrics.measurement import (
    CoreTime,
    Measurement,
    StageStats,
    StartStep,
    WorkSample,
)
from llmpq.dist.metrics.report import build_report, format_report
from llmpq.dist.metrics.stats import StageClock
from llmpq.spec.fields import Fields, from_json, to_json
from llmpq.spec.plan import PlanForecast, PlannedDraft, StageForecast
from llmpq.spec.precision import Phase

PLAN = make_plan((0, 1, 3))


def _stats(rank: int, decode_s: float | None) -> StageStats:
    return StageStats(
        rank=rank, load_s=2.0, busy_s=1.0, prefill_s=0.25, decode_s=decode_s, memory_bytes=2**20
    )


MEASUREMENT = Measurement(
    requests=3,
    generated_tokens=12,
    latency_s=4.0,
    load_s=2.5,
    stages=(_stats(0, 0.5), _stats(1, None)),
    policy="rra",
    records=(
        RequestRecord(
            request=0,
            prompt_tokens=3,
            new_tokens=4,
            arrival_s=1.0,
            start_s=1.5,
            first_token_s=2.0,
            end_s=3.5,
        ),
    ),
)


FORECAST = PlanForecast(
    latency_s=3.0,
    prefill_s=1.0,
    stages=(
        StageForecast(prefill_s=0.2, decode_s=0.1, prefill_busy_s=0.3, decode_busy_s=0.7),
        StageForecast(prefill_s=0.2, decode_s=0.1, prefill_busy_s=0.2, decode_busy_s=0.5),
    ),
)


def test_steps_of_the_start_are_reported_with_their_sum():
    steps = (("imports", 1.0, 3.0), ("layers", 3.0, 3.5))
    start = tuple(StartStep(name=name, begin_s=begin, end_s=end) for name, begin, end in steps)
    report = build_report(PLAN, replace(MEASUREMENT, start=start))
    assert report["start_s"] == {"total": 2.5, "imports": 2.0, "layers": 0.5}
    text = format_report(report, verbose=True)
    assert "first token after 2.50 s: imports 2.00 s, layers 500" in text
    assert "first token" not in format_report(report)


def test_report_is_the_promised_object():
    report = build_report(PLAN, MEASUREMENT)
    assert json.loads(json.dumps(report)) == {
        "status": "done",
        "requests": 3,
        "generated_tokens": 12,
        "elapsed_s": 4.0,
        "load_s": 2.5,
        "throughput_tokens_per_s": 3.0,
        "policy": "rra",
        "per_request": {
            name: dict.fromkeys(("mean", "p50", "p90", "p95", "p99"), seconds)
            for name, seconds in (
                ("latency_s", 2.5),
                ("service_s", 2.0),
                ("time_to_first_token_s", 1.0),
                ("time_per_token_s", 0.5),
            )
        },
        "latency_s": {"predicted": None, "measured": 4.0},
        "stages": [
            {
                "rank": rank,
                "device": f"here/cpu#{rank}",
                "memory_bytes": {"predicted": 5, "measured": 2**20},
                "prefill_s": {"predicted": None, "measured": 0.25},
                "decode_s": {"predicted": None, "measured": decode_s},
                "busy_fraction": 0.25,
                "wait_fraction": 0.0,
                "send_fraction": 0.0,
                "bubble_fraction": 0.75,
            }
            for rank, decode_s in ((0, 0.5), (1, None))
        ],
    }


def test_a_run_is_one_line_and_verbose_adds_its_stages():
    report = build_report(PLAN, MEASUREMENT)
    assert format_report(report) == "3 requests, 12 tokens in 4.00 s, 3.00 tokens/s"
    text = format_report(report, verbose=True)
    assert "here/cpu#0" in text
    assert "here/cpu#1" in text


def test_the_forecast_is_of_what_ran_and_not_of_the_plan():
    plan = replace(PLAN, estimate=replace(PLAN.estimate, latency_s=0.5, forecast=FORECAST))
    assert "forecast" not in format_report(build_report(plan, MEASUREMENT))
    own = replace(FORECAST, latency_s=4.24)
    assert format_report(build_report(plan, MEASUREMENT, own)) == (
        "3 requests, 12 tokens in 4.00 s, 3.00 tokens/s, forecast 4.24 s, +6%"
    )


def test_a_measurement_round_trips():
    value = json.loads(json.dumps(to_json(MEASUREMENT)))
    assert from_json(Measurement, Fields(value, "here")) == MEASUREMENT


def _played(rank: int) -> StageStats:
    work = (
        WorkSample(
            phase=Phase.PREFILL, rows=4, tokens=16, count=1, seconds=0.2, master_s=0.1 * (not rank)
        ),
        WorkSample(phase=Phase.DECODE, rows=2, tokens=20.5, count=6, seconds=0.6, master_s=0.0),
    )
    return replace(_stats(rank, 0.1), work=work)


def test_a_draft_model_on_another_device_has_a_line_of_its_own():
    plan = with_draft(PLAN, "m", device=1)
    own = replace(_stats(2, None), held=None, memory_bytes=9)
    found = build_report(plan, replace(MEASUREMENT, draft=own))
    assert [stage["memory_bytes"]["predicted"] for stage in found["stages"]] == [5, 5]
    assert found["draft_model"]["memory_bytes"] == {"predicted": 7, "measured": 9}
    assert found["draft_model"]["device"] == "here/cpu#1"
    assert "draft model on here/cpu#1: memory predicted 7 B, measured 9 B" in format_report(
        found, verbose=True
    )


def test_the_draft_model_counts_on_its_device():
    planned = PlannedDraft(
        model="m", num_speculative_tokens=2, device=0, acceptance_rate=0.7, cost=0.2, speedup=1.5,
        memory_bytes=70,
    )  # fmt: skip
    plan = replace(PLAN, draft=planned)
    found = build_report(plan, MEASUREMENT)["stages"]
    assert [one["memory_bytes"]["predicted"] for one in found] == [75, 5]


def test_a_run_with_a_forecast_is_compared_phase_by_phase_and_stage_by_stage():
    ran = replace(MEASUREMENT, stages=(_played(0), _played(1)), prefill_s=1.25)
    report = build_report(PLAN, ran, FORECAST)
    assert report["latency_s"] == {"predicted": 3.0, "measured": 4.0}
    assert report["phases"] == {
        "prefill": {"predicted": 1.0, "measured": 1.25},
        "decode": {"predicted": 2.0, "measured": 2.75},
    }
    first = report["stages"][0]
    assert first["prefill_busy_s"] == {"predicted": 0.3, "measured": pytest.approx(0.3)}
    assert first["decode_busy_s"] == {"predicted": 0.7, "measured": 0.6}
    assert [one["phase"] for one in first["work"]] == ["prefill", "decode"]
    text = format_report(report, verbose=True)
    assert "stage 1 busy" in text
    assert "-20%" in text  # prefill of the whole run: 1.0 s predicted, 1.25 s measured
    value = json.loads(json.dumps(to_json(ran)))
    assert from_json(Measurement, Fields(value, "here")) == ran


def test_seconds_are_not_compared_when_other_programs_took_the_cpu():
    for share, is_compared in ((0.02, True), (0.54, False)):
        stages = (_played(0), replace(_played(1), cpu_taken=share))
        measured = replace(MEASUREMENT, stages=stages, prefill_s=1.25)
        report = build_report(PLAN, measured, FORECAST)
        assert [stage.get("cpu_taken") for stage in report["stages"]] == [None, share]
        text = format_report(report, verbose=True)
        assert ("-20%" in text) == is_compared
        assert ("CPU busy with other programs: rank 1 54%" in text) != is_compared


def test_a_rank_reports_what_others_took_since_its_first_micro_batch():
    times = [CoreTime(ran_s=1.0, taken_s=5.0), CoreTime(ran_s=2.0, taken_s=5.25)]
    clock = StageClock(micro_batching=PLAN.micro_batching, read_core=lambda _: times.pop(0))
    assert clock.stats(0, torch.device("cpu")).cpu_taken is None
    clock.record(Phase.PREFILL, 1, 0.5)
    clock.record(Phase.DECODE, 1, 0.5)
    assert clock.stats(0, torch.device("cpu")).cpu_taken == pytest.approx(0.2)


def test_drafts_are_counted_where_there_are_some():
    assert "drafts" not in build_report(PLAN, MEASUREMENT)
    ran = replace(MEASUREMENT, draft_tokens=9, accepted_tokens=4)
    report = build_report(PLAN, ran)
    assert report["drafts"] == {"tokens": 9, "accepted": 4}
    assert "drafts: 9 tokens, 4 accepted" in format_report(report)
    value = json.loads(json.dumps(to_json(ran)))
    assert from_json(Measurement, Fields(value, "here")) == ran


def test_cached_prompt_tokens_are_counted_where_there_are_some():
    assert "prefix_cache" not in build_report(PLAN, MEASUREMENT)
    ran = replace(MEASUREMENT, cached_tokens=7)
    tokens = sum(record.prompt_tokens for record in ran.records)
    report = build_report(PLAN, ran)
    assert report["prefix_cache"] == {"tokens": tokens, "cached": 7}
    assert f"prefix cache: 7 of {tokens} prompt tokens" in format_report(report)


def test_the_bars_are_the_latency_its_phases_and_every_stage_s_work(tmp_path):
    pytest.importorskip("matplotlib")
    ran = replace(MEASUREMENT, stages=(_played(0), _played(1)), prefill_s=1.25)
    report = build_report(PLAN, ran, FORECAST)
    assert [name for name, _ in run_groups(report)] == [
        "latency", "prefill", "decode", "stage 0\nprefill work", "stage 0\ndecode work",
        "stage 1\nprefill work", "stage 1\ndecode work",
    ]  # fmt: skip
    for number, found in enumerate((report, build_report(PLAN, ran))):
        draw_run(found, tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").read_bytes().startswith(b"\x89PNG")
