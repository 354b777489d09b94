"""A wrong table is corrected by a run of the right machine."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmpq.costmodel.tables.recalibrate import Observation, corrected, correction_factors
from llmpq.errors import SpecError
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample, LatencyTable

WIDTHS = (3, 4, 8, 16)
TABLE = LatencyTable(
    samples=tuple(
        LatencySample(phase=phase, bits=bits, batch=2, tokens=64, seconds=1e-3 * (1 + bits))
        for phase in Phase
        for bits in (0, *WIDTHS)
    ),
    provenance=(("device", "cpu"),),
)


def run_of(true_factors, mixes):
    """Return what stages of these mixes would measure on a machine that differs by the factors."""
    return [
        Observation(
            phase=phase,
            predicted=dict(mix),
            apart_s=0.01,
            measured_s=0.01 + sum(true_factors[phase, b] * s for b, s in mix.items()),
        )
        for phase in Phase
        for mix in mixes
    ]


@settings(max_examples=50)
@given(seed=st.integers(0, 10_000))
def test_as_many_different_stages_as_bitwidths_determine_every_factor(seed):
    chance = random.Random(seed)
    true = {(phase, bits): chance.uniform(0.5, 2.0) for phase in Phase for bits in WIDTHS}
    mixes = [{bits: 1.0, 8: 0.1} if bits != 8 else {8: 1.0} for bits in WIDTHS]
    found = correction_factors(run_of(true, mixes))
    for key, value in true.items():
        assert found[key] == pytest.approx(value, rel=0.01)


@settings(max_examples=50)
@given(factor=st.floats(0.3, 3.0), seed=st.integers(0, 10_000))
@example(factor=0.3046875, seed=820)  # two mixes nearly alike
def test_any_mix_finds_a_machine_that_is_slower_at_all_bitwidths(factor, seed):
    chance = random.Random(seed)
    mixes = [{bits: chance.uniform(0.1, 1.0) for bits in WIDTHS} for _ in range(2)]
    true = {(phase, bits): factor for phase in Phase for bits in WIDTHS}
    found = correction_factors(run_of(true, mixes))
    for phase in Phase:
        for mix in mixes:
            again = sum(found[phase, bits] * seconds for bits, seconds in mix.items())
            assert again == pytest.approx(factor * sum(mix.values()), rel=1e-6)


def test_a_table_that_is_right_stays_as_it_is():
    true = {(phase, bits): 1.0 for phase in Phase for bits in WIDTHS}
    found = correction_factors(run_of(true, [{3: 1.0, 16: 2.0}]))
    assert corrected(TABLE, found).samples == TABLE.samples


def test_a_bitwidth_that_did_not_run_takes_its_phase_s_mean():
    table = corrected(TABLE, {(Phase.PREFILL, 4): 2.0, (Phase.PREFILL, 16): 8.0})
    found = {(s.phase, s.bits): s.seconds for s in table.samples}
    before = {(s.phase, s.bits): s.seconds for s in TABLE.samples}
    assert found[Phase.PREFILL, 8] == pytest.approx(4.0 * before[Phase.PREFILL, 8])
    assert found[Phase.PREFILL, 0] == before[Phase.PREFILL, 0]
    assert found[Phase.DECODE, 8] == before[Phase.DECODE, 8]
    assert "prefill 4 x2" in dict(table.provenance)["recalibrated"]
    assert dict(table.provenance)["device"] == "cpu"


def test_the_master_has_one_factor_whatever_the_bits_of_its_head():
    row = LatencySample(phase=Phase.DECODE, bits=-8, batch=2, tokens=1, seconds=0.5)
    (found,) = corrected(LatencyTable(samples=(row,)), {(Phase.DECODE, 0): 3.0}).samples
    assert found.seconds == 1.5


def test_a_run_without_work_is_rejected():
    with pytest.raises(SpecError, match="no measured work"):
        correction_factors([])
