"""``--devices`` and the devices of a cluster file, through the commands."""

import json
from pathlib import Path

import pytest

from llmpq.cli.commands import algo, check, sim
from llmpq.spec.plan import read_plan

ROOT = Path(__file__).parents[2]
OWN = {
    "type": "attic card", "kind": "cuda", "memory_bytes": 11 * 2**30, "memory_bytes_per_s": 4.84e11,
    "flops": {"float32": 1.13e13},
}  # fmt: skip
SMALL = ["--model", "facebook/opt-1.3b", "--global_bz", "4", "--s", "64", "--n", "8"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name, *entries):
    Path(name).write_text(json.dumps({"schema": 1, "devices": list(entries)}))
    return name


def test_a_plan_on_own_devices_carries_them_and_is_confirmed(capsys):
    file = write("own.json", OWN, OWN | {"type": "not used"})
    names = ["--device_names", "attic card", "T4-16G", "--device_numbers", "1", "1"]
    argv = [*SMALL, *names, "--devices", file, "--output", "p.json", "--dtype", "float32"]
    assert algo.main([*argv, "--json"]) == 0
    capsys.readouterr()
    assert [one.type for one in read_plan("p.json").cluster.device_types] == ["attic card"]
    Path(file).unlink()
    assert check.main(["p.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["fits"], found["warnings"]) == (True, [])
    assert sim.main(["--strategy", "p.json", "--json"]) == 0
    before = json.loads(capsys.readouterr().out)["makespan_s"]
    faster = write("fast.json", OWN | {"memory_bytes_per_s": 2e12, "flops": {"float32": 1e14}})
    assert sim.main(["--strategy", "p.json", "--devices", faster, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan_s"] < before
    assert check.main(["p.json", "--devices", faster, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"]


def test_a_cluster_file_may_describe_its_devices(capsys):
    cluster = str(ROOT / "inputs" / "clusters" / "two-gaming-pcs.json")
    argv = [*SMALL, "--cluster", cluster, "--dtype", "float16", "--json", "--no_explain"]
    assert algo.main(argv) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert all("my " in stage["device"] for stage in stages)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device_names", "attic card", "--device_numbers", "1"],
         "--device_names: field 'nodes[0].devices[0].type': device type: found 'attic card'"),
        (["--device_names", "attic card", "--device_numbers", "1", "--devices", "none.json"],
         "none.json: no such file"),
        (["--device_names", "attic card", "--device_numbers", "1", "--devices", "bad.json"],
         "bad.json: device type 'attic card': field 'memory_bytes' is missing"),
    ],
)  # fmt: skip
def test_a_wrong_description_names_file_and_field(argv, message, capsys):
    write("bad.json", {key: value for key, value in OWN.items() if key != "memory_bytes"})
    assert algo.main([*SMALL, *argv]) == 2
    assert message in capsys.readouterr().err
