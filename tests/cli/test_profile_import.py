"""``llmpq-profile import`` end to end, on made-up numbers in the columns of the real layouts."""

import json
from functools import partial
from pathlib import Path
from shutil import copytree

import pytest

from llmpq.cli.commands.profile import main
from llmpq.costmodel import build_costs
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.precision import Phase
from llmpq.spec.tables import read_comm_table, read_latency_table

FIXTURES = Path(__file__).parent / "fixtures"
VIDUR = FIXTURES / "vidur"
PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
MODEL = "meta-llama/Llama-2-7b-hf"
DENSE_MS = 0.127
"""Products, norms, rotary, activation and two additions of one token, before it grows."""


def dense_s(tokens):
    return DENSE_MS * (1 + tokens / 64) * 1e-3


def command(layout, path, output, *more):
    return main(["import", "--from", layout, "--path", str(path), "--output", str(output), *more])


def layer(layout, path, output, device="a100"):
    names = ("--device", device, "--device_type", "A100-80G", "--model", MODEL)
    return command(layout, path, output, *names, "--dtype", "float16")


def test_vidur_layers_are_products_small_kernels_and_attention_of_one_worker(tmp_path, capsys):
    assert layer("vidur", VIDUR, tmp_path / "a100.csv") == 0
    assert "5 points written" in capsys.readouterr().out
    table = read_latency_table(tmp_path / "a100.csv")
    found = {(one.phase, one.batch, one.tokens): one.seconds for one in table.samples}
    around = 5e-6  # keys and values saved, the output reshaped
    near = partial(pytest.approx, rel=1e-4)  # the fixture has six digits
    assert found == {  # a later chunk, an empty cache and unmeasured products are left out
        (PREFILL, 1, 64): near(dense_s(64) + 0.2e-3 + around),
        (PREFILL, 1, 256): near(dense_s(256) + 0.8e-3 + around),
        (DECODE, 1, 128): near(dense_s(1) + 0.02e-3 + around),
        (DECODE, 8, 128): near(dense_s(8) + 0.05e-3 + around),
        (DECODE, 8, 1024): near(dense_s(8) + 0.3e-3 + around),
    }
    assert dict(table.provenance)["imported_from"] == "vidur"


def test_helix_layers_are_told_by_model_and_machine(tmp_path):
    for machine, share in (("t4", 1.0), ("a100", 0.2)):
        output = tmp_path / f"{machine}.csv"
        assert layer("helix", FIXTURES / "helix.csv", output, f"made_up_7b/{machine}") == 0
        samples = read_latency_table(output).samples
        assert len(samples) == 6
        longest = next(one for one in samples if one.tokens == 1000)
        assert longest.seconds == pytest.approx(share * 21e-3)


@pytest.mark.parametrize(
    ("file", "column"),
    [
        ("mlp.csv", "time_stats.mlp_up_proj.median"),
        ("attention.csv", "kv_cache_size"),
        ("send_recv.csv", "devices_per_node"),
    ],
)
def test_a_column_that_is_not_there_is_named_with_its_file(tmp_path, capsys, file, column):
    folder = copytree(VIDUR, tmp_path / "vidur")
    text = (folder / file).read_text()
    (folder / file).write_text(text.replace(column, "renamed", 1))
    if file == "send_recv.csv":
        ask = ("--between", "a", "b")
        assert command("vidur", folder / file, tmp_path / "o.csv", *ask) == 2
    else:
        assert layer("vidur", folder, tmp_path / "o.csv") == 2
    told = capsys.readouterr().err
    assert f"found no column '{column}'" in told
    assert file in told
    assert not (tmp_path / "o.csv").exists()


@pytest.mark.parametrize(
    ("between", "latency_s", "bytes_per_s"),
    [(("here", "there"), 20e-6, 1e10), (("here", "here"), 10e-6, 1e11)],
)
def test_vidur_transfers_become_links_that_a_cluster_is_priced_with(
    tmp_path, capsys, between, latency_s, bytes_per_s
):
    ask = ("--between", *between, "--json")
    assert command("vidur", VIDUR / "send_recv.csv", tmp_path / "links.csv", *ask) == 0
    assert json.loads(capsys.readouterr().out)["points"] == 4
    origin = dict(read_comm_table(tmp_path / "links.csv").provenance)
    assert origin["command"].startswith("llmpq-profile import --from vidur")
    groups = (DeviceGroup(type="A100-80G", count=2),)
    cluster = Cluster(
        name="two", nodes=tuple(Node(name=name, devices=groups) for name in ("here", "there"))
    )
    model = catalog.model(MODEL)
    costs = build_costs(
        model, cluster, dtype="float16", kv_bits=16, profile_dir=tmp_path, latency="roofline"
    )
    first, near, far, _ = cluster.devices
    target = near if between[0] == between[1] else far
    size = 8 * 512 * model.hidden_size * 2
    expected = latency_s + size / bytes_per_s
    for source, goal in ((first, target), (target, first)):
        assert costs.send_s(source, goal, PREFILL, 8, 512) == pytest.approx(expected, rel=1e-3)


def test_layouts_without_transfers_say_so(tmp_path, capsys):
    assert command("aiconfigurator", tmp_path, tmp_path / "o.csv", "--between", "a", "b") == 2
    assert "aiconfigurator has collectives only" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["--device", "--model"])
def test_a_layer_needs_a_device_and_a_model(tmp_path, capsys, missing):
    given = {"--device": "a100", "--model": MODEL}
    del given[missing]
    words = [word for pair in given.items() for word in pair]
    assert command("vidur", VIDUR, tmp_path / "o.csv", *words) == 2
    assert f"{missing}: found nothing" in capsys.readouterr().err
