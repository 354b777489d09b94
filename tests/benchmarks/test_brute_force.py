"""A few problems of ``benchmarks/brute_force.py``, and that it would see a difference."""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import brute_force  # noqa: E402

from llmpq.cli.commands import algo  # noqa: E402

RESULTS = BENCHMARKS / "results" / "planner-claims.json"


def planner(words: Sequence[str]) -> tuple[int, str]:
    """Run ``llmpq-algo`` in this process."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = algo.main(list(words))
    return status, printed.getvalue()


@pytest.mark.parametrize("seed", range(500, 512))
def test_the_planner_finds_what_brute_force_finds(seed, tmp_path):
    sample = brute_force.compared(seed, tmp_path, planner)
    assert sample["difference"] == []


def test_a_worse_plan_is_a_difference(tmp_path):
    def slower(words: Sequence[str]) -> tuple[int, str]:
        status, printed = planner(words)
        plan = json.loads(printed)
        return status, json.dumps({**plan, "objective_s": plan["objective_s"] * (1 + 1e-6)})

    sample = brute_force.compared(500, tmp_path, slower)
    assert any("the best plan" in text for text in sample["difference"])


def test_the_recorded_problems_agree_and_some_need_devices_set_apart():
    found = json.loads(RESULTS.read_text(encoding="utf-8"))["samples"]
    assert len(found) >= 200
    assert not [sample["seed"] for sample in found if sample["difference"]]
    gains = [s["best_adjacent_s"] / s["best_s"] for s in found if s["best_s"] is not None]
    assert max(gains) > 1.05
    assert math.isclose(min(gains), 1.0)


def test_it_uses_no_code_of_the_planner():
    assert "llmpq.assigner" not in Path(brute_force.__file__).read_text(encoding="utf-8")
