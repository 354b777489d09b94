"""The report has exactly the promised fields, and says what it compares."""

from __future__ import annotations

import json

from helpers.ranks import make_plan

from llmpq.dist.measurement import Measurement, StageStats, measurement_from_fields
from llmpq.dist.report import build_report, format_report
from llmpq.spec.fields import Fields

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
)


def test_report_is_the_promised_object():
    report = build_report(PLAN, MEASUREMENT)
    assert json.loads(json.dumps(report)) == {
        "status": "done",
        "requests": 3,
        "generated_tokens": 12,
        "elapsed_s": 4.0,
        "load_s": 2.5,
        "throughput_tokens_per_s": 3.0,
        "latency_s": {"predicted": 1.0, "measured": 4.0},
        "stages": [
            {
                "rank": rank,
                "device": f"here/cpu#{rank}",
                "memory_bytes": {"predicted": 5, "measured": 2**20},
                "prefill_s": {"predicted": 1.0, "measured": 0.25},
                "decode_s": {"predicted": 1.0, "measured": decode_s},
                "busy_fraction": 0.25,
            }
            for rank, decode_s in ((0, 0.5), (1, None))
        ],
    }


def test_the_table_names_every_stage_and_what_the_prediction_is_for():
    text = format_report(PLAN, build_report(PLAN, MEASUREMENT))
    assert "the prediction is for 4 requests of 16 + 8 tokens" in text
    assert "predicted 1.00 s, measured 4.00 s" in text
    assert "here/cpu#0" in text
    assert "here/cpu#1" in text


def test_a_measurement_round_trips():
    value = json.loads(json.dumps(MEASUREMENT.to_json()))
    assert measurement_from_fields(Fields(value, "here")) == MEASUREMENT
