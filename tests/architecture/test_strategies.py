"""Every strategy that is shipped reads, fits, and is still worth what it says."""

import json
from pathlib import Path

import pytest

from llmpq.cli.commands.check import main
from llmpq.spec.cluster import load_cluster
from llmpq.spec.plan import plan_text, read_plan

REPOSITORY = Path(__file__).resolve().parents[2]
STRATEGIES = sorted((REPOSITORY / "strategies").glob("*.json"))
CLUSTERS = sorted((REPOSITORY / "inputs" / "clusters").glob("*.json"))


def test_there_are_strategies_to_check():
    assert len(STRATEGIES) >= 30


@pytest.mark.parametrize("path", STRATEGIES, ids=lambda path: path.stem)
def test_a_strategy_prices_to_its_stored_estimate(path, capsys):
    assert main([str(path), "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["warnings"] == []
    assert verdict["fits"] is True


@pytest.mark.parametrize("path", STRATEGIES, ids=lambda path: path.stem)
def test_a_strategy_is_what_its_name_and_command_say(path):
    plan = read_plan(path)
    assert plan_text(plan) == path.read_text()
    model, cluster, workload, method = path.stem.split("__")
    assert plan.model.name.endswith(model)
    assert (plan.cluster.name, plan.workload.name) == (cluster, workload)
    assert plan.search.method == method
    assert plan.provenance.command.endswith(f"--method {method}")


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_cluster_file_loads_under_its_name(path):
    assert load_cluster(path).name == path.stem
