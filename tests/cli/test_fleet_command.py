"""llmpq-algo --replicas and llmpq-check of a fleet file."""

from __future__ import annotations

import json

import pytest

from llmpq.cli.commands import algo, check
from llmpq.spec.plan import read_fleet, write_fleet

MODEL = ["--model", "facebook/opt-13b", "--global_bz", "8", "--s", "64", "--n", "16"]
DEVICES = ["--device_names", "V100-32G", "T4-16G", "--device_numbers", "2", "2"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("fleet") / "fleet.json"
    options = [*MODEL, *DEVICES, "--replicas", "auto", "--quality_budget", "1.0"]
    picture = ["--plot", str(path.with_suffix(".png"))]
    assert algo.main([*options, *picture, "--output", str(path)]) == 0
    return path


def test_fleet_file_names_every_replica_and_is_read_back_the_same(made):
    fleet = read_fleet(made)
    assert len(fleet.replicas) >= 2
    labels = [name for replica in fleet.replicas for name in replica.devices]
    known = {device.label for device in fleet.cluster.devices}
    assert len(set(labels)) == len(labels)
    assert {*labels, *fleet.idle} == known
    plans = fleet.plans(made)
    total = sum(plan.workload.batch / plan.estimate.latency_s for plan in plans)
    assert fleet.requests_per_s == pytest.approx(total)
    assert sum(plan.workload.batch for plan in plans) <= 8
    text = made.read_text()
    write_fleet(made, fleet)
    assert made.read_text() == text
    assert made.with_suffix(".png").stat().st_size > 10_000


def test_table_has_the_replicas_the_other_cuts_and_the_reasons(capsys, tmp_path):
    options = [*MODEL, *DEVICES, "--replicas", "1", "--quality_budget", "1.0"]
    assert algo.main([*options, "--output", str(tmp_path / "one.json")]) == 0
    text = capsys.readouterr().out
    assert "requests/s, optimal; no replica loses more than 1" in text
    assert "one pipeline" in text
    assert "one replica a device type" in text
    assert f"{tmp_path / 'one.json'} and 1 strategy files" in text


def test_the_time_of_many_requests_is_that_of_all_replicas_together(made, capsys):
    assert check.main([str(made), "--json", "--requests", "50000"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["requests"]["seconds"] == pytest.approx(
        50_000 / record["requests_per_s"], rel=0.01
    )
    assert check.main([str(made), "--requests", "50000"]) == 0
    assert "requests       50,000 take " in capsys.readouterr().out
    assert check.main([str(made), "--requests", "0"]) == 2
    assert "--requests: found 0, expected at least 1" in capsys.readouterr().err


def test_what_limits_a_fleet_is_named_with_what_would_lift_it(capsys, tmp_path):
    options = [*MODEL, *DEVICES, "--replicas", "auto", "--quality_budget", "0"]
    options += ["--orders", "types", "--output", str(tmp_path / "fleet.json")]
    assert algo.main(options) == 0
    text = capsys.readouterr().out
    assert "--quality_budget 0.0035 allows 8 bits in every layer" in text
    assert "--orders all searches every order" in text
    assert algo.main([*options, "--json"]) == 0
    limits = json.loads(capsys.readouterr().out)["limits"]
    assert (limits["budget"], limits["bits"], limits["has_all_orders"]) == (0.0035, 8, False)
    assert limits["time_limit_s"] is None


def test_check_confirms_a_fleet(made, capsys):
    assert check.main([str(made), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["fits"]
    assert record["warnings"] == []
    assert record["status"] == "optimal"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f["replicas"][0].update(strategy="none.json"), "none.json"),
        (lambda f: f["replicas"][0]["devices"].append("node9/x#0"), "found device 'node9/x#0'"),
        (
            lambda f: f["replicas"][0].update(devices=f["replicas"][1]["devices"]),
            "2 times, expected once",
        ),
        (lambda f: f.update(model="other"), "expected 'other'"),
        (lambda f: f.update(replicas=[]), "field 'replicas'"),
    ],
)
def test_a_damaged_fleet_file_is_one_clear_error(made, capsys, change, message):
    found = json.loads(made.read_text())
    change(found)
    path = made.with_name("damaged.json")
    path.write_text(json.dumps(found))
    assert check.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("error:") == 1


def test_a_wrong_rate_is_a_warning(made, capsys):
    found = json.loads(made.read_text())
    found["replicas"][0]["requests_per_s"] *= 2
    path = made.with_name("wrong.json")
    path.write_text(json.dumps(found))
    assert check.main([str(path)]) == 0
    assert "requests/s, the fleet file states" in capsys.readouterr().err


def test_replicas_that_share_cores_are_a_warning(tmp_path, capsys):
    workers = {"type": "cpu", "count": 3, "threads": 2, "memory_bytes": 2 << 30}
    nodes = [{"name": "host", "cores": 4, "devices": [workers]}]
    cluster = {"schema": 1, "name": "host", "nodes": nodes, "links": []}
    (tmp_path / "cluster.json").write_text(json.dumps(cluster))
    path = tmp_path / "fleet.json"
    words = ["--model", "facebook/opt-125m", "--global_bz", "4", "--s", "32", "--n", "8"]
    words += ["--cluster", str(tmp_path / "cluster.json"), "--replicas", "2"]
    assert algo.main([*words, "--quality_budget", "1", "--output", str(path)]) == 0
    assert "cores          host has 4 cores for 6 threads of workers" in capsys.readouterr().out
    assert check.main([str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []
    found = json.loads(path.read_text())
    found["cluster"]["nodes"][0]["cores"] = 3
    path.write_text(json.dumps(found))
    assert check.main([str(path), "--json"]) == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert warning.startswith("host: its replicas have 4 threads on 3 cores and slow each other")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--replicas", "0"], "expected auto or a number from 1"),
        (["--replicas", "9"], "replicas: found 9, expected 1 to 4"),
        (["--same_bits"], "--same_bits: found without --replicas"),
        (["--replicas", "2", "--pareto", "2"], "--replicas: found together with --pareto"),
        (["--replicas", "2", "--exclude", "T4-16G"], "found with --exclude T4-16G"),
    ],
)
def test_options_that_do_not_fit_are_refused(capsys, options, message):
    assert algo.main([*MODEL, *DEVICES, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def at_a_rate(tmp_path_factory):
    path = tmp_path_factory.mktemp("rate") / "fleet.json"
    options = [*MODEL, *DEVICES, "--replicas", "auto", "--quality_budget", "1.0", "--rate", "0.5"]
    picture = ["--plot", str(path.with_suffix(".png"))]
    assert algo.main([*options, *picture, "--output", str(path)]) == 0
    return path


def test_a_fleet_for_a_rate_states_shares_and_ttft(at_a_rate, capsys):
    fleet = read_fleet(at_a_rate)
    assert sum(replica.arrivals_per_s for replica in fleet.replicas) == pytest.approx(0.5)
    assert fleet.ttft_bound_s == pytest.approx(fleet.ttft_s, rel=1e-5)
    assert check.main([str(at_a_rate)]) == 0
    text = capsys.readouterr().out
    assert "at 0.5 arrivals/s, optimal; no replica loses more than 1" in text
    assert "every stored figure is confirmed" in text
    assert at_a_rate.with_suffix(".png").stat().st_size > 10_000


def test_a_ttft_that_the_plans_do_not_have_is_a_warning(at_a_rate, capsys):
    found = json.loads(at_a_rate.read_text())
    found["ttft_s"] *= 0.5
    path = at_a_rate.with_name("damaged.json")
    path.write_text(json.dumps(found))
    assert check.main([str(path), "--json"]) == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert "its plans give a TTFT of" in warning


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--rate", "2"], 2, "--rate: found without --replicas"),
        (["--replicas", "auto", "--rate", "-1"], 2, "rate: found -1.0"),
        (["--replicas", "auto", "--rate", "1e6"], 3, "answer fewer than 1e+06 requests/s"),
    ],
)
def test_rates_that_cannot_be_used_are_errors(options, status, message, capsys, tmp_path):
    words = [*MODEL, *DEVICES, "--quality_budget", "1.0", "--output", str(tmp_path / "f.json")]
    assert algo.main([*words, *options]) == status
    assert message in capsys.readouterr().err
