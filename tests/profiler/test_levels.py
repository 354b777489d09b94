"""Two levels of a core's speed: told apart, and timings brought to the calm one."""

from __future__ import annotations

import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmpq.profiler import reference as reference_module
from llmpq.profiler.bench import MASTER_BITS, Timing, Trial
from llmpq.profiler.grid import Shape
from llmpq.profiler.levels import Slowdown, Timed, levels_of
from llmpq.profiler.reference import DISTURBED, reference_s
from llmpq.spec.precision import Phase


def trial_of(phase: Phase, batch: int, bits: int = 4) -> Trial:
    return Trial(shape=Shape(phase=phase, batch=batch, tokens=8), bits=bits, layers=2)


def timed(trial: Trial, seconds: float, before_s: float = 1.0, after_s: float = 1.0) -> Timed:
    return Timed(timing=Timing(trial=trial, seconds=seconds), before_s=before_s, after_s=after_s)


def test_the_loop_takes_the_time_of_its_turns(monkeypatch):
    monkeypatch.setattr(reference_module, "REFERENCE_TURNS", 100_000)
    long_s = min(reference_s() for _ in range(5))
    monkeypatch.setattr(reference_module, "REFERENCE_TURNS", 1_000)
    assert 0 < min(reference_s() for _ in range(5)) < long_s


@given(
    seed=st.integers(0, 10**6),
    factors=st.tuples(st.floats(1.05, 2.0), st.floats(1.05, 2.0)),
    share=st.floats(0.1, 0.9),
)
def test_levels_are_found_again(seed, factors, share):
    chance = random.Random(seed)
    factor = dict(zip(Phase, factors, strict=True))
    calm = {trial_of(phase, batch): chance.uniform(1e-3, 1) for phase in Phase for batch in
            range(1, 9)}  # fmt: skip
    everything = []
    for _ in range(30):
        for trial, seconds in calm.items():
            is_slow = chance.random() < share
            loop_s = chance.uniform(1.85, 1.95) if is_slow else chance.uniform(1.0, 1.1)
            slower = factor[trial.shape.phase] if is_slow else 1.0
            everything.append(
                timed(trial, slower * seconds * chance.uniform(0.99, 1.01), loop_s, loop_s)
            )
    found = levels_of(everything)
    for phase in Phase:
        assert found.factor(phase) == pytest.approx(factor[phase], rel=0.02)
    for trial, seconds in calm.items():
        assert median(found.times[trial]) == pytest.approx(seconds, rel=0.02)
        assert len(found.times[trial]) == 30
    assert found.disturbed_share == pytest.approx(share, abs=0.12)


def test_few_rows_may_suffer_more_than_many():
    factor = {1: 1.2, 2: 1.6, 4: 1.4, 8: 1.2, 16: 1.1}
    everything = [
        timed(trial, seconds, loop_s, loop_s)
        for rows, slower in factor.items()
        for tokens in range(9)
        for trial in (
            Trial(shape=Shape(phase=Phase.DECODE, batch=rows, tokens=tokens), bits=4, layers=2),
        )
        for seconds, loop_s in ((rows, 1.0), (rows, 1.0), (slower * rows, 2.0))
    ]
    found = levels_of(everything)
    slowdown = found.slowdowns[Phase.DECODE, 4]
    assert dict(slowdown.by_rows) == pytest.approx(factor)
    assert found.disturbed_share == pytest.approx(1 / 3)
    assert all(times == pytest.approx([trial.shape.rows] * 3)
               for trial, times in found.times.items())  # fmt: skip
    assert found.level(trial_of(Phase.DECODE, 2)) == pytest.approx(1 + 0.6 / 3)
    assert found.level(trial_of(Phase.PREFILL, 2)) == 1.0  # of which there were none


def test_trials_that_met_one_level_take_the_factor_of_the_nearest_by_rows():
    few = [trial_of(Phase.DECODE, rows) for rows in range(1, 10)]
    many = [trial_of(Phase.DECODE, rows) for rows in range(1000, 1009)]
    lone = trial_of(Phase.DECODE, 5000)
    found = levels_of(
        [
            *(timed(trial, 1.0 + 0.5 * slow, 1.0 + slow, 1.0 + slow)
              for trial in few for slow in (0, 1)),
            *(timed(trial, 1.0 + 0.1 * slow, 1.0 + slow, 1.0 + slow)
              for trial in many for slow in (0, 1)),
            timed(lone, 1.1, 2.0, 2.0),
        ]
    )  # fmt: skip
    assert found.times[lone] == [pytest.approx(1.0)]
    assert found.slowdowns[Phase.DECODE, 4].at(3) == pytest.approx(1.5)


@given(
    by_rows=st.dictionaries(st.integers(1, 4096), st.floats(1.0, 3.0), min_size=1, max_size=8),
    rows=st.integers(1, 8192),
)
def test_a_slowdown_lies_between_those_of_its_neighbours(by_rows, rows):
    slowdown = Slowdown(tuple(sorted(by_rows.items())))
    below = max((one for one in by_rows if one <= rows), default=min(by_rows))
    above = min((one for one in by_rows if one >= rows), default=max(by_rows))
    ends = by_rows[below], by_rows[above]
    assert min(ends) - 1e-9 <= slowdown.at(rows) <= max(ends) + 1e-9
    if rows in by_rows:
        assert slowdown.at(rows) == by_rows[rows]
    assert Slowdown().at(rows) == 1.0


def test_a_timing_during_which_the_level_changed_is_left_out():
    trial = trial_of(Phase.DECODE, 1)
    found = levels_of([timed(trial, 1.0), timed(trial, 5.0, 1.0, 2.0), timed(trial, 7.0, 2.0, 1.0)])
    assert found.times[trial] == [1.0]


def test_a_trial_is_never_left_without_a_timing():
    changed, disturbed = trial_of(Phase.DECODE, 1), trial_of(Phase.DECODE, 2)
    both = [trial_of(Phase.DECODE, batch) for batch in (3, 4, 5)]
    found = levels_of(
        [
            timed(changed, 3.0, 1.0, 2.0),
            timed(disturbed, 8.0, 2.0, 2.0),
            *(timed(trial, 1.0) for trial in both),
            *(timed(trial, 2.0, 2.0, 2.0) for trial in both),
        ]
    )
    assert found.slowdowns[Phase.DECODE, 4].middle == 2.0
    assert found.times[disturbed] == [4.0]
    assert found.times[changed] == [2.0]  # half of it on either level


def test_too_few_trials_on_both_levels_tell_no_factor():
    trials = [trial_of(Phase.PREFILL, batch) for batch in (1, 2)]
    found = levels_of(
        [timed(trial, 1.0 + slow, 1.0 + slow, 1.0 + slow) for trial in trials for slow in (0, 1)]
    )
    assert found.factor(Phase.PREFILL) == 1.0


def test_a_bitwidth_without_a_factor_takes_that_of_its_phase():
    trials = [trial_of(Phase.PREFILL, batch) for batch in (1, 2, 3)]
    lone = trial_of(Phase.PREFILL, 1, bits=16)
    everything = [timed(trial, 1.0 + slow, 1.0 + slow, 1.0 + slow) for trial in trials
                  for slow in (0, 1)]  # fmt: skip
    found = levels_of([*everything, timed(lone, 6.0, 2.0, 2.0)])
    assert found.times[lone] == [3.0]


def test_the_masters_own_work_says_nothing_of_layers():
    trials = [trial_of(Phase.DECODE, batch, bits=MASTER_BITS) for batch in (1, 2, 3)]
    found = levels_of(
        [timed(trial, 1.0 + slow, 1.0 + slow, 1.0 + slow) for trial in trials for slow in (0, 1)]
    )
    assert found.factor(Phase.DECODE) == 1.0
    assert found.slowdowns[Phase.DECODE, MASTER_BITS].middle == 2.0


def test_a_steady_machine_has_one_level():
    trials = [trial_of(Phase.DECODE, batch) for batch in range(1, 9)]
    found = levels_of([timed(trial, 1.0, DISTURBED, DISTURBED) for trial in trials])
    assert found.disturbed_share == 0
    assert {one.middle for one in found.slowdowns.values()} == {1.0}


def test_no_timings_are_no_levels():
    assert levels_of([]).times == {}
