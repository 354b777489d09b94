"""A wrong table is corrected by a run of the right machine."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmpq.costmodel.tables.profiles import SchedulerOverhead, drift_of, stage_loop_of
from llmpq.costmodel.tables.recalibrate import (
    LoopObservation,
    Observation,
    corrected,
    correction_factors,
    drift_between,
    master_loop,
    stage_loop,
)
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
def test_as_many_unlike_stages_as_bitwidths_tell_every_factor(seed):
    chance = random.Random(seed)
    true = {(phase, bits): chance.uniform(0.5, 2.0) for phase in Phase for bits in WIDTHS}
    mixes = [{bits: 1.0, 8: 0.1} if bits != 8 else {8: 1.0} for bits in WIDTHS]
    found = correction_factors(run_of(true, mixes))
    for key, value in true.items():
        assert found[key] == pytest.approx(value, rel=0.01)


@settings(max_examples=50)
@given(factor=st.floats(0.3, 3.0), seed=st.integers(0, 10_000))
@example(factor=0.3046875, seed=820)  # two mixes nearly alike
def test_a_machine_that_is_slower_throughout_is_found_so_by_any_mix(factor, seed):
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


def test_a_run_without_work_is_refused():
    with pytest.raises(SpecError, match="no measured work"):
        correction_factors([])


def test_runs_that_differ_tell_the_drift():
    seconds = (0.9, 1.0, 1.1)
    runs = [
        Observation(phase=phase, predicted={16: 1.0}, apart_s=0.0, measured_s=one, run=number)
        for number, one in enumerate(seconds)
        for phase in Phase
    ]
    factors = correction_factors(runs)
    assert drift_between(runs, factors) == pytest.approx(0.1, rel=0.01)
    assert drift_between([one for one in runs if not one.run], factors) == 0.0


@pytest.mark.parametrize(("stated", "between", "told"), [(None, 0.1, 0.1), ("0.2", 0.1, 0.2)])
def test_the_larger_drift_is_told(stated, between, told):
    lines = () if stated is None else (("drift", stated),)
    table = LatencyTable(samples=TABLE.samples, provenance=lines)
    new = corrected(table, {(Phase.DECODE, 8): 1.0}, drift=between)
    assert drift_of("table", dict(new.provenance)) == told


def test_the_loop_is_told_apart_by_runs_of_unlike_micro_batches():
    true = SchedulerOverhead(step_s=4e-4, row_s=2e-5)
    runs = [
        LoopObservation(
            micro_batches=count, rows=rows, seconds=count * true.step_s + rows * true.row_s
        )
        for count, rows in ((400, 1600), (200, 3200))
    ]
    found = master_loop(runs)
    assert (found.step_s, found.row_s) == (pytest.approx(4e-4), pytest.approx(2e-5))
    table = corrected(TABLE, {(Phase.DECODE, 8): 1.0}, found)
    assert SchedulerOverhead.of("table", dict(table.provenance)) == found
    alone = master_loop(runs[:1])  # one run cannot tell rows from micro-batches
    assert (alone.step_s, alone.row_s) == (pytest.approx(4e-4 + 4 * 2e-5), 0.0)
    assert master_loop([]) == SchedulerOverhead()


def test_the_loop_of_other_stages_is_their_mean():
    runs = [
        LoopObservation(micro_batches=n, rows=n, seconds=s) for n, s in ((100, 0.01), (300, 0.01))
    ]
    assert stage_loop(runs) == pytest.approx(0.02 / 400)
    assert stage_loop([]) == 0.0
    table = corrected(TABLE, {(Phase.DECODE, 8): 1.0}, stage_loop_s=5e-5)
    assert stage_loop_of("table", dict(table.provenance)) == 5e-5
    kept = corrected(table, {(Phase.DECODE, 8): 1.0})
    assert stage_loop_of("table", dict(kept.provenance)) == 5e-5
    assert stage_loop_of("table", {}) == 0.0


@pytest.mark.parametrize("text", ["-0.1", "nan", "much"])
def test_a_loop_that_is_none_is_refused(text):
    with pytest.raises(SpecError, match=f"provenance 'stage_loop_s': found '{text}'"):
        stage_loop_of("table", {"stage_loop_s": text})


@pytest.mark.parametrize("text", ["-0.1", "11", "much"])
def test_a_drift_that_is_none_is_refused(text):
    with pytest.raises(SpecError, match=f"provenance 'drift': found '{text}'"):
        drift_of("table", {"drift": text})
