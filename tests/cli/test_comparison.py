"""The table of all methods."""

from __future__ import annotations

from helpers.builders import plan_request

from llmpq.assigner import METHODS, make_plan
from llmpq.assigner.explain.compare import Outcome
from llmpq.cli.commands.algo import main
from llmpq.cli.render import comparison_table
from llmpq.errors import InfeasibleError


def test_the_cheapest_comes_first_and_reasons_last() -> None:
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


def test_without_any_plan_only_reasons_are_left() -> None:
    outcome = Outcome(method="llmpq", plan=None, error=InfeasibleError("too large"))
    assert comparison_table([outcome]) == "llmpq: no plan: too large"


def test_all_methods_are_one_table_and_one_file_each(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["--model", "facebook/opt-1.3b", "--global_bz", "4", "--s", "64", "--n", "8"]
    argv += ["--device_names", "T4-16G", "P100-12G", "--device_numbers", "1", "1"]
    assert main([*argv, "--method", "all"]) == 0
    printed = capsys.readouterr().out
    table, _, files = printed.partition("written ")
    rows = [line.split()[0] for line in table.splitlines() if line]
    assert sorted(rows[1:]) == sorted(METHODS)
    assert rows[1] == "llmpq"
    assert files.count(".json") == len(list((tmp_path / "strategies").iterdir())) == len(METHODS)
