"""The parts of the comparison on two machines that run nothing."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import two_machines  # noqa: E402
from two_machines import LINK, LLAMA_CPP, LOOPBACK, OURS, PARTS, Machine, Place, Setting  # noqa: E402

pytestmark = pytest.mark.nightly

BATCHES = (1, 4, 16)


def setting(**values: int) -> Setting:
    return Setting(**{"workers": 2, "first": 8, "threads": 1, "tokens": 512, **values})


def theirs(batch: int, seconds: float, **values: int) -> dict[str, Any]:
    where = {"place": LINK, "bits": "8", "batch": batch, "seconds": seconds}
    return {**where, "run": LLAMA_CPP, "setting": asdict(setting(**values))}


def own(batch: int, seconds: float, predicted: float) -> dict[str, Any]:
    where = {"place": LINK, "bits": "8", "batch": batch, "seconds": seconds}
    return {**where, "run": OURS, "predicted": predicted}


def test_settings_pipeline_every_batch_of_several_sequences():
    for place in (LOOPBACK, LINK):
        found = two_machines.settings(place, BATCHES)
        assert len(set(found)) == len(found)
        for batch in BATCHES:
            fitting = [one for one in found if two_machines._is_for(one, batch)]
            assert any(one.tokens < batch for one in fitting) == (batch > 1)
            assert any(one.tokens >= batch for one in fitting)
            assert {one.workers for one in fitting} == {1, 2}


def test_a_host_of_the_link_has_one_thread():
    assert {one.threads for one in two_machines.settings(LINK, BATCHES)} == {1}
    assert {one.threads for one in two_machines.settings(LOOPBACK, BATCHES)} == {1, 2}


@pytest.mark.parametrize("first", [7, 8])
def test_words_of_a_setting_divide_all_layers_and_the_head(first):
    two = setting(first=first).words(["a:1", "b:2"])
    assert two[two.index("--rpc") + 1] == "a:1,b:2"
    assert sum(map(int, two[two.index("-ts") + 1].split(","))) == PARTS
    one = setting(first=first, workers=1).words(["b:2"])
    assert int(one[one.index("-ngl") + 1]) == PARTS - first
    assert "-ts" not in one


def test_later_rounds_run_the_best_setting_of_each_batch():
    runs = [theirs(1, 2.0), theirs(1, 3.0, tokens=8), theirs(16, 9.0), theirs(16, 4.0, tokens=8)]
    assert set(two_machines.best_settings(runs)) == {setting(), setting(tokens=8)}
    assert two_machines.best_settings([]) == []


def test_a_row_has_our_median_and_the_best_run_of_the_other():
    runs = [
        own(4, 1.0, 1.1), own(4, 2.0, 1.1), own(4, 1.24, 1.1),
        theirs(4, 3.1), theirs(4, 2.48, tokens=2), theirs(4, 2.6, tokens=2),
        own(16, 1.0, 1.0),
    ]  # fmt: skip
    (row,) = two_machines.rows(runs)
    assert row[:5] == ["8", "4", "100 (62-124)", "50", "2.00"]
    assert row[5:8] == ["1.240", "1.100", "-11.3%"]
    assert row[8] == setting(tokens=2).label
    (table,) = two_machines.tables(runs)
    assert table["title"] == two_machines.TITLES[LINK]
    assert len(table["columns"]) == len(row)


def test_workers_of_one_machine_share_it():
    here, there = (Machine(before=(), address=f"10.0.0.{number}") for number in (1, 2))
    assert Place(name=LOOPBACK, machines=(here,)).of_worker(1) is here
    assert Place(name=LINK, machines=(here, there)).of_worker(1) is there


def test_runs_are_kept_in_the_folder(tmp_path):
    assert two_machines.runs_of(tmp_path) == []
    two_machines._keep(tmp_path / "runs.jsonl", own(1, 1.0, 1.0))
    assert two_machines.runs_of(tmp_path) == [own(1, 1.0, 1.0)]
