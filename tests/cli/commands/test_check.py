"""llmpq-check through ``main(argv)``."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from llmpq.cli.commands.algo import main as algo
from llmpq.cli.commands.check import main

ARGV = ["--model", "facebook/opt-13b", "--device_names", "T4-16G", "V100-32G", "P100-12G"]
ARGV += ["--device_numbers", "1", "1", "1", "--global_bz", "8", "--s", "128", "--n", "20"]
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


@pytest.fixture(scope="module")
def strategy(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    assert algo([*ARGV, "--output", str(path), "--json"]) == 0
    return path


@pytest.fixture
def edited(strategy, tmp_path):
    """Write a changed copy of the plan; ``change`` edits its JSON object in place."""

    def write(change) -> str:
        value = json.loads(strategy.read_text(encoding="utf-8"))
        change(value)
        path = tmp_path / "edited.json"
        path.write_text(json.dumps(value), encoding="utf-8")
        return str(path)

    return write


def test_a_fresh_plan_is_confirmed(strategy, capsys) -> None:
    assert main([str(strategy)]) == 0
    printed = capsys.readouterr()
    assert "every stored figure is confirmed" in printed.out
    assert printed.err == ""


def test_json_says_the_same_as_the_planner(strategy, capsys) -> None:
    assert main([str(strategy), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert found["warnings"] == []
    assert found["repriced"]["latency_s"] == pytest.approx(found["latency_s"], rel=1e-12)
    assert len(found["repriced"]["stages"]) == len(found["stages"])


def test_a_wrong_estimate_is_called_out(edited, capsys) -> None:
    def falsify(value) -> None:
        value["estimate"]["latency_s"] *= 0.5
        value["estimate"]["quality"] += 0.5

    assert main([edited(falsify)]) == 0
    text = capsys.readouterr().err
    assert "'estimate.latency_s': the file says" in text
    assert "'estimate.quality'" in text


def test_a_plan_over_memory_is_status_3(edited, capsys) -> None:
    def widen(value) -> None:
        for stage in value["stages"]:
            stage["bits"] = [16] * len(stage["bits"])
        value["cluster"]["nodes"][1]["devices"][0]["memory_bytes"] = 4_000_000_000

    assert main([edited(widen)]) == 3
    printed = capsys.readouterr()
    assert "does NOT fit" in printed.out
    assert "more memory" in printed.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(surprise=1), "surprise"),
        (lambda v: v["stages"][0].update(first_layer=1), "stages[0]"),
        (lambda v: v["model"].update(name="facebook/opt-1"), "opt-1"),
        (lambda v: v["micro_batching"].update(prefill=99), "micro_batching.prefill"),
    ],
)
def test_a_broken_file_is_status_2(edited, change, message, capsys) -> None:
    assert main([edited(change)]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_model_folder_is_a_warning(edited, capsys) -> None:
    path = edited(lambda v: v["model"].update(source="gone/for/good"))
    assert main([path]) == 0
    assert "'gone/for/good' is not here" in capsys.readouterr().err


def test_measured_quality_asks_for_its_table(edited, capsys) -> None:
    path = edited(lambda v: v["provenance"]["inputs"].update(omega="variance 1234"))
    assert main([path]) == 0
    assert "--omega_file" in capsys.readouterr().err


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
def test_plot_writes_a_picture(strategy, tmp_path, capsys) -> None:
    picture = tmp_path / "plan.png"
    assert main([str(strategy), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000
    assert "cannot be written" not in capsys.readouterr().err


def test_plot_without_matplotlib_names_the_extra(strategy, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert main([str(strategy), "--plot", str(tmp_path / "plan.png")]) == 2
    assert "llmpq[plot]" in capsys.readouterr().err
