"""Plans of large models with experts on the host, beside rules of thumb and reported speeds."""

from __future__ import annotations

import copy
import json

import pytest

from benchmarks.expert_plans import BOXES, REPORTS, RULES, faults, report, report_row, row_of
from scripts.docs_site.evidence import RESULTS


@pytest.fixture(scope="module")
def record():
    """Two boxes: one GPU, and two that share a processor; and the first report."""
    two = next(box for box in BOXES if box.count == 2)
    return {
        "rows": [row_of("125B-A6B", box) for box in (BOXES[0], two)],
        "reports": [report_row(REPORTS[0])],
    }


def test_no_rule_is_faster_than_a_plan(record):
    assert faults(record) == []
    for row in record["rows"]:
        assert all(row["latency_s"] <= (row[f"{rule}_latency_s"] or 1e9) for rule in RULES)
    two = record["rows"][1]
    assert two["speeds"][1] > 2 * two["cpu-moe"][1]


def test_a_rule_that_is_faster_is_a_fault(record):
    worse = copy.deepcopy(record)
    worse["rows"][1]["latency_s"] *= 1.5
    worse["rows"][1]["planning_s"] = 11.0
    worse["reports"][0]["found"] = [402, 60.0]
    found = faults(worse)
    assert len(found) >= 3
    assert "planned in 11.0 s" in found[0]
    assert "125B-A6B by exllamav3 -mcl 43: 3.7" in found[-1]


def test_tables_have_a_line_for_each_row(record):
    assert len(report(record).splitlines()) == 4 + 2 + 5 + 1


def test_recorded_plans_have_no_faults():
    stored = json.loads((RESULTS / "expert-plans.json").read_text(encoding="utf-8"))["record"]
    assert faults(stored) == []
    assert len(stored["rows"]) == 4 * len(BOXES)
    assert len(stored["reports"]) == len(REPORTS)
