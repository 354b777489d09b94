"""Rooflines against public measurements: what the catalogue states of each family holds.

The recorded comparison covers all tables; what the installed package and the shared data hold is
compared again, the package with models that the figures were not fitted to.
"""

import argparse
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks import rooflines
from llmpq.costmodel.roofline import RooflineLatencyModel
from llmpq.spec import catalog
from llmpq.spec.devices.figures import UNMEASURED
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample

ROOT = Path(__file__).resolve().parents[2]
RECORD = json.loads((rooflines.RESULTS / "rooflines.json").read_text(encoding="utf-8"))
FAMILIES = RECORD["tables"][0]["rows"]
DATA = Path(os.environ.get("LLMPQ_SHARED_DATA", ROOT.parent / "shared" / "data"))
OPTIONS = argparse.Namespace(database=None, data=DATA, vidur=None, llmservingsim=None)
OTHER_MODELS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-32B")
"""Models that the figures were not fitted to."""
DATABASE = {
    "a100_sxm": "A100-80G-SXM", "l40s": "L40S", "h100_sxm": "H100", "h200_sxm": "H200",
    "b200_sxm": "B200", "b300_sxm": "B300", "rtx_pro_6000_server": "RTX-PRO-6000",
    "b60": "Arc-Pro-B60",
}  # fmt: skip
SHARED = {
    "helix t4": partial(rooflines.helix, "t4", "T4-16G"),
    "helix v100": partial(rooflines.helix, "v100", "V100-32G"),
    "helix l4": partial(rooflines.helix, "l4", "L4"),
    "rtx 4090": rooflines.rtx_4090,
}
LLAMA = catalog.model("meta-llama/Llama-3.1-8B")


def check(device, tables):
    ratios = rooflines.compared(tables, {})
    assert set(ratios) == set(Phase)
    for phase, found in ratios.items():
        share = rooflines.within(catalog.device(device), phase, found)
        assert share >= rooflines.COVERED, (phase, share)


@pytest.mark.parametrize("row", FAMILIES, ids=lambda row: row["family"])
def test_four_of_five_recorded_points_are_within_what_the_family_states(row):
    for phase in Phase:
        assert row[f"{phase.value}: points"] > 0
        assert row[f"{phase.value}: within"] >= 100 * rooflines.COVERED


def test_every_family_is_recorded():
    assert [row["family"] for row in FAMILIES] == [one.name for one in rooflines.FAMILIES]


@pytest.mark.parametrize("one", RECORD["samples"], ids=lambda one: one["table"])
def test_the_record_is_of_the_catalogue_as_it_is(one):
    spec = catalog.device(one["device"])
    for name, value in one["figures"].items():
        assert getattr(spec, name) == (tuple(value) if isinstance(value, list) else value), name


@pytest.mark.parametrize("name", DATABASE)
def test_layers_of_other_models_are_within_it_too(name, monkeypatch):
    pytest.importorskip("pyarrow")
    pytest.importorskip("aiconfigurator_core")
    monkeypatch.setattr(rooflines, "DATABASE_MODELS", OTHER_MODELS)
    check(DATABASE[name], list(rooflines.database(name, DATABASE[name], OPTIONS)))


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the shared measurements")
@pytest.mark.parametrize("name", SHARED)
def test_shared_tables_are_within_it(name):
    tables = list(SHARED[name](OPTIONS))
    check(tables[0].device, tables)


def test_what_no_table_measured_states_a_factor_of_two():
    """A type states its architecture's deviation, which it shares with a measured type."""
    measured = {catalog.device(one["device"]) for one in RECORD["samples"]}
    stated = {(one.compute_capability, one.prefill_deviation) for one in measured}
    for spec in map(catalog.device, catalog.device_types()):
        if (spec.compute_capability, spec.prefill_deviation) not in stated:
            assert (spec.prefill_deviation, spec.decode_deviation) == (UNMEASURED, UNMEASURED)


def test_a_fit_finds_the_figures_that_a_table_was_made_with():
    true = {"compute_efficiency": 0.6, "memory_efficiency": 0.9, "overlap_loss": 0.4,
            "decode_efficiency": 0.7}  # fmt: skip
    spec = replace(catalog.device("V100-32G"), **true)
    roof = RooflineLatencyModel(model=LLAMA, device=spec, dtype="bfloat16", kv_bits=16)
    shapes = [(Phase.PREFILL, 1, tokens) for tokens in (64, 250, 1000, 4000)]
    shapes += [(Phase.DECODE, batch, 512) for batch in (1, 8, 32, 128, 256)]
    samples = tuple(
        LatencySample(phase=phase, bits=16, batch=batch, tokens=tokens,
                      seconds=roof.layer_s(phase, 16, batch, tokens, 0))
        for phase, batch, tokens in shapes
    )  # fmt: skip
    table = rooflines.Table(name="t", device="V100-32G", model=LLAMA, samples=samples)
    kept = [name for name in rooflines.FIGURES if name not in true]
    assert rooflines.fit([table], kept) == pytest.approx(true, rel=0.05)
    ratios = rooflines.compared([table], true)
    assert all(one == pytest.approx(1.0) for (found,) in ratios.values() for one in found)


def test_a_deviation_leaves_as_much_out_at_either_side():
    ratios = [0.5] + [0.88] * 4 + [1.0] * 11 + [1.17] * 3 + [3.0]
    assert rooflines.stated([ratios]) == pytest.approx((0.15, 0.2))
    spec = replace(catalog.device("L40S"), prefill_deviation=rooflines.stated([ratios]))
    assert rooflines.within(spec, Phase.PREFILL, [ratios]) == pytest.approx(0.9)


def test_a_small_table_counts_as_much_as_a_large_one():
    large, small = [1.0] * 1000, [1.28] * 10
    assert rooflines.stated([large, small]) == pytest.approx((0.15, 0.3))
    spec = catalog.device("L40S")
    spec = replace(spec, prefill_deviation=(0.1, 0.1))
    assert rooflines.within(spec, Phase.PREFILL, [large, small]) == 0.5
