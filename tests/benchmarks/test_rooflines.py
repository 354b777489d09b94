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

from benchmarks import rooflines, scoreboards
from llmpq.costmodel.roofline import RooflineLatencyModel
from llmpq.spec import catalog
from llmpq.spec.devices.figures import UNMEASURED
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample

ROOT = Path(__file__).resolve().parents[2]
RECORD = json.loads((rooflines.RESULTS / "rooflines.json").read_text(encoding="utf-8"))
WIDE_ROWS, FEW_ROWS = (table["rows"] for table in RECORD["tables"])
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


def scores_of(reader):
    is_scores = isinstance(reader, partial) and reader.func is rooflines.scores
    return reader(OPTIONS) if is_scores else ()


def check(device, tables):
    ratios = rooflines.compared(tables, {}, {})
    assert set(ratios) == set(Phase)
    for phase, found in ratios.items():
        share = rooflines.within(catalog.device(device), phase, found, tables[0].bits)
        assert share >= rooflines.COVERED, (phase, share)


@pytest.mark.parametrize(
    "row", WIDE_ROWS + FEW_ROWS, ids=lambda row: f"{row['family']}, {row.get('bits', 16)}"
)
def test_four_of_five_recorded_points_are_within_what_the_family_states(row):
    for phase in Phase:
        assert row[f"{phase.value}: points"] > 0
        assert row[f"{phase.value}: within"] >= 100 * rooflines.COVERED


def test_every_family_is_recorded():
    recorded = {row["family"] for row in WIDE_ROWS + FEW_ROWS}
    assert recorded == {one.name for one in rooflines.FAMILIES}


@pytest.mark.parametrize("one", RECORD["samples"], ids=lambda one: one["table"])
def test_the_record_is_of_the_catalogue_as_it_is(one):
    spec = catalog.device(one["device"])
    if one["bits"] != rooflines.WIDE:
        spec = spec.precision_cost(one["bits"])
    for name, value in one["figures"].items():
        assert getattr(spec, name) == (tuple(value) if isinstance(value, list) else value), name


@pytest.mark.parametrize("name", DATABASE)
def test_layers_of_other_models_are_within_it_too(name, monkeypatch):
    pytest.importorskip("pyarrow")
    pytest.importorskip("aiconfigurator_core")
    monkeypatch.setattr(rooflines, "DATABASE_MODELS", OTHER_MODELS)
    check(DATABASE[name], list(rooflines.database(name, DATABASE[name], OPTIONS)))


SCORES = {
    (family.name, bits): [table for table in tables if table.bits == bits]
    for family in rooflines.FAMILIES
    for tables in [[table for reader in family.readers for table in scores_of(reader)]]
    for bits in {table.bits for table in tables}
}
"""Published speeds of whole models, by family and bits."""


@pytest.mark.parametrize("key", SCORES, ids=str)
def test_published_speeds_are_within_it(key):
    check(SCORES[key][0].device, SCORES[key])


def test_every_published_speed_is_of_a_family():
    named = [table.name for tables in SCORES.values() for table in tables]
    every = [
        f"{board.source} {device} {bits}"
        for board in scoreboards.BOARDS
        for device, speeds in board.speeds.items()
        for bits in speeds
    ]
    assert sorted(named) == sorted(every)


def test_published_answers_are_faster_at_8_bits_and_more_so_at_4():
    for board in scoreboards.BOARDS:
        for speeds in board.speeds.values():
            last = [speeds[bits][-1] for bits in (16, 8, 4) if bits in speeds]
            assert last == sorted(last)


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the shared measurements")
@pytest.mark.parametrize("name", SHARED)
def test_shared_tables_are_within_it(name):
    tables = list(SHARED[name](OPTIONS))
    check(tables[0].device, tables)


def test_what_no_table_measured_states_a_factor_of_two():
    """A type states its architecture's deviation, which it shares with a measured type."""
    wide = [one for one in RECORD["samples"] if one["bits"] == rooflines.WIDE]
    measured = {catalog.device(one["device"]) for one in wide}
    stated = {(one.compute_capability, one.prefill_deviation) for one in measured}
    for spec in map(catalog.device, catalog.device_types()):
        if (spec.compute_capability, spec.prefill_deviation) not in stated:
            assert (spec.prefill_deviation, spec.decode_deviation) == (UNMEASURED, UNMEASURED)


STUDIED = ("T4-16G", "V100-32G", "A100-40G")
"""Types whose fewer bits the LLM-PQ cluster study states, but the P100: a factor of two."""


def test_fewer_bits_that_no_table_measured_state_a_factor_of_two():
    """Others share the factors, and so the deviation, of a type that was measured or studied."""
    known = {(row["measured"].split(", ")[0], row["bits"]) for row in FEW_ROWS}
    known |= {(name, bits) for name, of in rooflines.SPEED_UPS.items() for bits in of}
    known |= {(name, bits) for name in STUDIED for bits in (8, 4, 3)}
    costs = {catalog.device(name).precision_cost(bits) for name, bits in known}
    for spec in map(catalog.device, catalog.device_types()):
        for bits in (8, 4, 3):
            if spec.precision_cost(bits) not in costs:
                stated = {spec.deviation(phase, bits) for phase in Phase}
                assert stated == {UNMEASURED}, (spec.type, bits)


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
    ratios = rooflines.compared([table], true, {})
    assert all(one == pytest.approx(1.0) for (found,) in ratios.values() for one in found)


def test_a_fit_of_fewer_bits_finds_the_factors_that_a_table_was_made_with():
    true = rooflines.PACKED | {"compute": 1.3, "stream": 0.8}
    spec = rooflines.with_factors(catalog.device("RTX4090"), 4, true)
    roof = RooflineLatencyModel(model=LLAMA, device=spec, dtype="bfloat16", kv_bits=16)
    samples = tuple(
        LatencySample(phase=phase, bits=4, batch=1, tokens=512,
                      seconds=roof.layer_s(phase, 4, 1, 512, 0))
        for phase in Phase
    )  # fmt: skip
    table = rooflines.Table(name="t", device="RTX4090", model=LLAMA, samples=samples, bits=4)
    assert rooflines.fit_packed([table], {}) == pytest.approx(true, rel=0.02)
    assert rooflines.fit_few([table], {}) == {4: rooflines.fit_packed([table], {})}


def test_few_points_state_a_factor_of_two():
    assert rooflines.stated([[1.0], [1.0, 1.0]]) == UNMEASURED
    assert rooflines.stated([[1.0, 1.0], [1.0, 1.0]]) == pytest.approx((0.15, 0.15))


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
