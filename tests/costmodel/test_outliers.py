"""One slow or fast sample moves no other shape; tables of the law's own form come back."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fidelity import whole_model
from llmpq.costmodel.tables.fidelity import split_shapes
from llmpq.costmodel.tables.latency import RegressionLatencyModel, Samples, fit_without_outliers
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample, LatencyTable

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
BATCHES, LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128), (64, 256, 512, 1024, 2048)
GRID = [(batch, tokens) for batch in BATCHES for tokens in LENGTHS]
BETWEEN = [(batch, tokens) for batch in (3, 6, 12, 24, 48, 96) for tokens in (100, 400, 700, 1500)]
SAMULLM = Path(
    os.environ.get("LLMPQ_SHARED_DATA", Path(__file__).resolve().parents[3] / "shared" / "data")
) / "samullm"  # fmt: skip
OUTLIERS = (1.5, 5.0)
"""Least and largest factor of an outlier."""

costs = st.fixed_dictionaries({
    "constant": st.floats(1e-5, 1e-3),
    "row": st.floats(1e-8, 1e-5),
    "work": st.floats(1e-13, 1e-9),
    "token": st.floats(0.0, 1e-7),
})  # fmt: skip


def law(phase, batch, tokens, cost):
    """The features of LLM-PQ, Sec. 4.1, in the law's form."""
    rows = batch * tokens if phase is PREFILL else batch
    return (
        cost["constant"] + cost["row"] * rows + cost["work"] * rows * tokens
        + cost["token"] * tokens
    )  # fmt: skip


def samples_of(phase, cost, factors=None, noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    factors = factors or {}
    return [
        LatencySample(
            phase=phase, bits=16, batch=batch, tokens=tokens,
            seconds=law(phase, batch, tokens, cost) * factors.get((batch, tokens), 1.0)
            * float(np.exp(noise * rng.normal())),
        )
        for batch, tokens in GRID
    ]  # fmt: skip


def planted(samples, seed, power):
    """Make one sample in twenty slower (1), faster (-1) or leave it as it was (0)."""
    chance = np.random.default_rng(seed)
    count = max(1, len(samples) // 20)
    chosen = chance.permutation(len(samples))[:count].tolist()
    factors = dict(zip(chosen, chance.uniform(*OUTLIERS, count).tolist(), strict=True))
    return [
        replace(one, seconds=one.seconds * factors.get(place, 1.0) ** power)
        for place, one in enumerate(samples)
    ]


def model_of(samples):
    return RegressionLatencyModel(LatencyTable(samples=tuple(samples)))


@settings(max_examples=30, deadline=None)
@given(cost=costs, phase=st.sampled_from(Phase))
def test_a_table_of_the_law_is_exact_where_measured_and_close_between(cost, phase):
    model = model_of(samples_of(phase, cost))
    for batch, tokens in GRID:
        found = model.seconds(phase, 16, batch, tokens)
        assert found == pytest.approx(law(phase, batch, tokens, cost), rel=1e-9)
    for batch, tokens in BETWEEN:
        found = model.seconds(phase, 16, batch, tokens)
        assert found == pytest.approx(law(phase, batch, tokens, cost), rel=1e-3)


@settings(max_examples=30, deadline=None)
@given(
    cost=costs,
    phase=st.sampled_from(Phase),
    place=st.sampled_from([(b, t) for b, t in GRID if b not in (1, 128) and t not in (64, 2048)]),
    factor=st.sampled_from([0.2, 0.5, 2.0, 5.0]),
    shape=st.tuples(st.integers(1, 500), st.floats(1, 9000)),
    more=st.tuples(st.integers(1, 500), st.floats(1, 9000)),
)
def test_one_outlier_moves_no_other_shape_and_the_law_never_falls(
    cost, phase, place, factor, shape, more
):
    model = model_of(samples_of(phase, cost, {place: factor}, noise=0.01))
    here = model.seconds(phase, 16, *shape)
    larger = model.seconds(phase, 16, max(shape[0], more[0]), max(shape[1], more[1]))
    assert 0 < here <= larger * (1 + 1e-12)
    errors = [
        abs(model.seconds(phase, 16, *asked) / law(phase, *asked, cost) - 1.0)
        for asked in (*BETWEEN, *GRID)
        if asked != place
    ]
    assert np.mean(errors) < 0.015
    assert max(errors) < 0.06


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("power", [1, -1])
@pytest.mark.parametrize("seed", range(12))
def test_one_outlier_in_twenty_leaves_the_mean_error_small(phase, power, seed):
    cost = {"constant": 2e-4, "row": 1e-6, "work": 2e-11, "token": 1e-8}
    kept = samples_of(phase, cost, noise=0.01)
    model = model_of(planted(kept, seed, power))
    errors = [
        abs(model.seconds(phase, 16, *asked) / law(phase, *asked, cost) - 1.0) for asked in BETWEEN
    ]
    assert np.mean(errors) < 0.01


def test_a_slow_sample_lifts_no_larger_one():
    cost = {"constant": 1e-3, "row": 2e-5, "work": 1e-7, "token": 3e-6}
    model = model_of(samples_of(DECODE, cost, {(16, 512): 5.0}, noise=0.01))
    assert model.seconds(DECODE, 16, 24, 700) == pytest.approx(law(DECODE, 24, 700, cost), rel=0.02)
    assert model.seconds(DECODE, 16, 16, 512) == pytest.approx(law(DECODE, 16, 512, cost), rel=0.03)


def test_a_slow_sample_with_no_larger_one_may_be_true():
    # The largest batch does not fit a cache: nothing else was measured there.
    cost = {"constant": 1e-3, "row": 0.0, "work": 0.0, "token": 0.0}
    samples = [one for one in samples_of(DECODE, cost) if one.tokens == 512]
    samples += [one for one in samples_of(DECODE, cost) if one.tokens == 64]
    last = LatencySample(phase=DECODE, bits=16, batch=256, tokens=512, seconds=2e-3)
    model = model_of([*samples, last])
    assert model.seconds(DECODE, 16, 256, 512) == 2e-3
    assert model.seconds(DECODE, 16, 300, 512) >= 2e-3
    assert model.seconds(DECODE, 16, 128, 512) == 1e-3


def test_few_samples_have_no_outlier():
    seconds = np.array([1e-3, 9e-3, 1e-3, 1e-3, 1e-3])
    tokens = np.full(5, 64.0)
    few = Samples(
        phase=DECODE, batch=np.arange(1.0, 6.0), tokens=tokens, longest=tokens, seconds=seconds
    )
    assert fit_without_outliers(few)[1].all()


def test_planted_outliers_are_one_in_twenty_and_seeded():
    kept = samples_of(DECODE, {"constant": 1e-3, "row": 1e-5, "work": 0.0, "token": 0.0})
    changed = planted(kept, 3, 1)
    ratios = np.array([new.seconds / old.seconds for new, old in zip(changed, kept, strict=True)])
    assert (ratios != 1.0).sum() == len(kept) // 20
    assert OUTLIERS[0] <= ratios.max() <= OUTLIERS[1]
    assert changed == planted(kept, 3, 1)
    assert changed != planted(kept, 4, 1)
    slow, fast = (planted(kept, 3, power) for power in (1, -1))
    for one, other, old in zip(slow, fast, kept, strict=True):
        assert one.seconds * other.seconds == pytest.approx(old.seconds**2)


@pytest.mark.slow
@pytest.mark.skipif(not SAMULLM.is_dir(), reason="needs SamuLLM's measured iterations")
@pytest.mark.parametrize("power", [0, 1, -1])
def test_measured_models_are_forecast_within_the_target(power):
    errors = {phase: [] for phase in Phase}
    for file in sorted(SAMULLM.glob("iter_*.csv")):
        kept, held = split_shapes(whole_model(file))
        for phase in Phase:
            learned = planted(kept.select(phase, 16), 0, power)
            model = model_of(learned)
            errors[phase] += [
                abs(model.seconds(phase, 16, one.batch, one.tokens) / one.seconds - 1.0)
                for one in held.select(phase, 16)
            ]
    assert np.mean(errors[PREFILL]) <= (0.04 if power else 0.015)
    assert np.mean(errors[DECODE]) <= (0.06 if power else 0.04)
