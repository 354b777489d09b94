import os
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest

from llmpq.costmodel.importers.import_table import ImportRequest, import_table
from llmpq.costmodel.tables.fidelity import fidelity, split_shapes, summarise
from llmpq.costmodel.tables.latency import RegressionLatencyModel
from llmpq.errors import ProfileMissError, SpecError
from llmpq.spec import catalog
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample, LatencyTable

DATA = Path(
    os.environ.get("LLMPQ_SHARED_DATA", Path(__file__).resolve().parents[3] / "shared" / "data")
)
HELIX = DATA / "helix" / "per_layer_bs2time.csv"


def sample(phase, bits, batch, tokens):
    seconds = 1e-4 + 1e-6 * batch * tokens + 1e-5 * bits
    return LatencySample(phase=phase, bits=bits, batch=batch, tokens=tokens, seconds=seconds)


TABLE = LatencyTable(
    samples=tuple(
        sample(phase, bits, batch, tokens)
        for phase in Phase
        for bits in (4, 16)
        for batch in (1, 2, 4, 8)
        for tokens in (16, 64, 256, 512, 1024)
    )
)


def shapes(table, phase):
    return {(one.batch, one.tokens) for one in table.samples if one.phase is phase}


@pytest.mark.parametrize("phase", Phase)
def test_a_split_parts_shapes_not_samples(phase):
    kept, held = split_shapes(TABLE, seed=1)
    assert not shapes(kept, phase) & shapes(held, phase)
    assert shapes(kept, phase) | shapes(held, phase) == shapes(TABLE, phase)
    assert len(shapes(held, phase)) == 6  # 30 % of 20
    assert len(kept.samples) + len(held.samples) == len(TABLE.samples)


def test_a_split_is_its_seeds():
    assert split_shapes(TABLE, 3) == split_shapes(TABLE, 3)
    assert split_shapes(TABLE, 3) != split_shapes(TABLE, 4)


def test_one_shape_cannot_be_parted():
    with pytest.raises(SpecError, match="found 1 shape of decode, expected at least two"):
        split_shapes(LatencyTable(samples=(sample(Phase.DECODE, 16, 1, 1),)))


def test_errors_are_relative_and_absolute():
    model = RegressionLatencyModel(TABLE)
    held = LatencyTable(
        samples=tuple(
            replace(one, seconds=model.seconds(one.phase, one.bits, one.batch, one.tokens) / factor)
            for one, factor in zip(TABLE.samples, cycle((1.1, 0.9)), strict=False)
        )
    )
    for report in fidelity(TABLE, held).values():
        assert (report.mean, report.median, report.p95) == (pytest.approx(0.1),) * 3
    report = summarise([0.0, 0.1, 0.2, 0.9])
    assert (report.mean, report.median, report.points) == (
        pytest.approx(0.3), pytest.approx(0.15), 4,
    )  # fmt: skip
    assert 0.2 < report.p95 < 0.9


@pytest.mark.parametrize("law", ["hinged", "paper"])
def test_a_lawful_table_is_forecast_well(law):
    reports = fidelity(TABLE, law=law)
    assert set(reports) == set(Phase)
    assert all(report.mean < 0.01 and report.points == 12 for report in reports.values())


def test_a_hold_out_of_another_bitwidth_is_a_miss():
    held = LatencyTable(samples=(sample(Phase.DECODE, 8, 1, 1),))
    with pytest.raises(ProfileMissError, match="8 bits"):
        fidelity(TABLE, held)


def test_the_masters_rows_do_not_count():
    held = LatencyTable(samples=(sample(Phase.DECODE, 0, 1, 16), sample(Phase.DECODE, 16, 1, 16)))
    assert fidelity(TABLE, held)[Phase.DECODE].points == 1


def helix_means(device):
    """Mean errors over five splits of one device's table, by law and phase."""
    request = ImportRequest(
        model=catalog.model("meta-llama/Llama-2-70b-hf"), device=device, device_type="T4-16G",
        path=HELIX,
    )  # fmt: skip
    table = import_table("helix", request)
    return {
        (law, phase): sum(fidelity(table, seed=seed, law=law)[phase].mean for seed in range(5)) / 5
        for law in ("hinged", "paper")
        for phase in Phase
    }


needs_helix = pytest.mark.skipif(
    not HELIX.is_file(), reason="measured data is not here (LLMPQ_SHARED_DATA)"
)


@pytest.mark.slow
@needs_helix
@pytest.mark.parametrize(
    ("device", "prefill", "decode"),
    [("llama1_30b/t4", 0.025, 0.045), ("llama1_30b/v100", 0.025, 0.045)],
)
def test_measured_layers_are_forecast_within_the_target(device, prefill, decode):
    means = helix_means(device)
    assert means["hinged", Phase.PREFILL] < prefill
    assert means["hinged", Phase.DECODE] < decode
    assert all(means["hinged", phase] < means["paper", phase] for phase in Phase)


@pytest.mark.slow
@needs_helix
@pytest.mark.parametrize("model", ["llama1_30b", "llama2_70b"])
@pytest.mark.parametrize("machine", ["t4", "v100", "a100", "l4"])
def test_no_measured_layer_is_forecast_a_point_worse_than_by_the_papers_regression(machine, model):
    means = helix_means(f"{model}/{machine}")
    for phase in Phase:
        assert means["hinged", phase] <= means["paper", phase] + 0.01
