import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.costmodel.tables.latency import LEAST_DEVIATION, RegressionLatencyModel, fit_law, gather
from llmpq.errors import ProfileMissError
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample, LatencyTable

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
GRID = [(batch, tokens) for batch in (1, 2, 4, 8, 16, 32) for tokens in (64, 128, 256, 512, 1024)]


def law(phase, batch, tokens):
    """A kernel with a regime change at 512 rows, tiles of 128 rows, and attention."""
    rows = batch * tokens if phase is PREFILL else batch
    products = 2e-4 + 1e-5 * -(-rows // 128) + 2e-7 * max(rows - 512, 0)
    return products + 1e-10 * rows * tokens


def table(phase=PREFILL, shapes=GRID, noise=0.0, bits=16):
    rng = np.random.default_rng(0)
    return LatencyTable(
        samples=tuple(
            LatencySample(
                phase=phase,
                bits=bits,
                batch=batch,
                tokens=tokens,
                seconds=law(phase, batch, tokens) * float(np.exp(noise * rng.normal())),
            )
            for batch, tokens in shapes
        )
    )


FITTED = {phase: RegressionLatencyModel(table(phase, noise=0.02)) for phase in Phase}
sizes = st.tuples(st.integers(1, 5000), st.floats(1, 2e5))


@given(phase=st.sampled_from(Phase), shape=sizes, more=sizes)
def test_answers_are_positive_and_never_fall_with_batch_or_tokens(phase, shape, more):
    model = FITTED[phase]
    here = model.seconds(phase, 16, *shape)
    assert here > 0
    larger = model.seconds(phase, 16, max(shape[0], more[0]), max(shape[1], more[1]))
    assert larger >= here * (1 - 1e-12)


@settings(max_examples=10, deadline=None)
@given(
    points=st.dictionaries(
        st.tuples(st.integers(1, 64), st.integers(1, 4096)),
        st.floats(1e-6, 10.0),
        min_size=1,
        max_size=20,
    ),
    phase=st.sampled_from(Phase),
    shape=sizes,
    more=sizes,
)
def test_arbitrary_samples_give_positive_monotone_answers(points, phase, shape, more):
    samples = tuple(
        LatencySample(phase=phase, bits=4, batch=batch, tokens=tokens, seconds=seconds)
        for (batch, tokens), seconds in points.items()
    )
    model = RegressionLatencyModel(LatencyTable(samples=samples))
    here = model.seconds(phase, 4, *shape)
    larger = model.seconds(phase, 4, max(shape[0], more[0]), max(shape[1], more[1]))
    assert 0 < here <= larger * (1 + 1e-12)


@pytest.mark.parametrize("phase", Phase)
def test_a_law_with_tiles_and_a_change_of_slope_is_recovered(phase):
    model = RegressionLatencyModel(table(phase))
    for batch, tokens in ((3, 200), (12, 700), (24, 100), (6, 900)):
        found = model.seconds(phase, 16, batch, tokens)
        assert found == pytest.approx(law(phase, batch, tokens), rel=0.04)


def test_a_step_between_close_samples_is_recovered_on_both_sides():
    def stepped(batch):
        return 1e-3 + 1e-5 * batch + (4e-4 if batch > 64 else 0.0)

    batches = (1, 2, 4, 8, 16, 32, 48, 56, 64, 80, 96, 128)
    samples = tuple(
        LatencySample(phase=DECODE, bits=16, batch=batch, tokens=tokens, seconds=stepped(batch))
        for batch in batches
        for tokens in (64, 256)
    )
    model = RegressionLatencyModel(LatencyTable(samples=samples))
    for batch in (60, 65, 68, 72):
        assert model.seconds(DECODE, 16, batch, 128) == pytest.approx(stepped(batch), rel=0.02)


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_few_points_are_enough_for_an_answer_near_them(count):
    shapes = GRID[:: len(GRID) // count][:count]
    model = RegressionLatencyModel(table(DECODE, shapes))
    for batch, tokens in shapes:
        assert model.seconds(DECODE, 16, batch, tokens) == pytest.approx(
            law(DECODE, batch, tokens), rel=0.1
        )


def test_seconds_proportional_to_sequences_are_recovered():
    samples = tuple(
        LatencySample(phase=PREFILL, bits=16, batch=batch, tokens=64 // batch, seconds=0.01 * batch)
        for batch in (1, 2, 4, 8, 16, 32)
    )
    model = RegressionLatencyModel(LatencyTable(samples=samples))
    assert model.seconds(PREFILL, 16, 8, 8) == pytest.approx(0.08, rel=0.01)


def test_an_answer_outside_the_samples_is_marked_and_less_sure():
    model = FITTED[DECODE]
    inside = model.estimate(DECODE, 16, 8, 256)
    near = model.estimate(DECODE, 16, 64, 256)
    far = model.estimate(DECODE, 16, 64, 8192)
    assert not inside.is_extrapolated
    assert near.is_extrapolated
    assert far.is_extrapolated
    assert inside.relative_deviation < near.relative_deviation < far.relative_deviation
    assert inside.seconds == model.seconds(DECODE, 16, 8, 256)


def test_the_deviation_inside_is_about_the_noise():
    deviation = FITTED[PREFILL].estimate(PREFILL, 16, 4, 256).relative_deviation
    assert 0.005 < deviation < 0.06


def test_the_papers_law_is_plain_least_squares():
    samples = gather(table().samples)
    model = RegressionLatencyModel(table(), "paper")
    features = np.stack(
        [
            np.ones(len(samples)), samples.batch, samples.tokens,
            samples.batch * samples.tokens, samples.batch * samples.tokens**2,
        ],
        axis=1,
    )  # fmt: skip
    expected = features @ np.linalg.lstsq(features, samples.seconds, rcond=None)[0]
    found = [model.seconds(PREFILL, 16, *shape) for shape in sorted(GRID)]
    assert found == pytest.approx(list(expected), rel=1e-6)
    assert model.estimate(PREFILL, 16, 64, 1024).is_extrapolated


def test_the_law_beats_the_papers_regression_where_a_kernel_changes_regime():
    law, paper = fit_law(gather(table().samples)), RegressionLatencyModel(table(), "paper")

    def error(seconds):
        return np.mean([abs(seconds(one.batch, one.tokens) / one.seconds - 1) for one in measured])

    measured = table().samples
    paper_error = error(lambda batch, tokens: paper.seconds(PREFILL, 16, batch, tokens))
    assert error(law.seconds) < 0.2 * paper_error


def test_a_bitwidth_without_samples_is_a_miss():
    with pytest.raises(ProfileMissError, match=r"no decode samples at 8 bits, only at \[16\]"):
        FITTED[DECODE].seconds(DECODE, 8, 1, 1)


def test_the_same_table_gives_the_same_answers():
    first, again = (RegressionLatencyModel(table(noise=0.1)) for _ in range(2))
    assert first.seconds(PREFILL, 16, 5, 333) == again.seconds(PREFILL, 16, 5, 333)


@pytest.mark.parametrize("phase", Phase)
def test_a_measured_shape_answers_for_itself(phase):
    measured = table(phase)
    model = RegressionLatencyModel(measured)
    for one in measured.samples:
        found = model.seconds(phase, 16, one.batch, one.tokens)
        assert found == pytest.approx(one.seconds, rel=1e-12)


def test_the_claimed_deviation_far_outside_covers_the_error():
    # Learned from small batches, where this kernel waits for memory and takes the same time.
    def flat_then_steep(batch):
        return 1e-3 * max(1.0, batch / 64)

    shapes = [(batch, tokens) for batch in (1, 2, 4, 8, 16, 32, 64) for tokens in (64, 256, 1024)]
    samples = tuple(
        LatencySample(
            phase=DECODE, bits=16, batch=batch, tokens=tokens, seconds=flat_then_steep(batch)
        )
        for batch, tokens in shapes
    )
    found = RegressionLatencyModel(LatencyTable(samples=samples)).estimate(DECODE, 16, 512, 256)
    assert found.is_extrapolated
    error = abs(np.log(found.seconds / flat_then_steep(512)))
    assert found.relative_deviation > 0.45 * error


def test_between_measurements_that_contradict_each_other_the_law_decides():
    samples = tuple(
        LatencySample(phase=DECODE, bits=16, batch=batch, tokens=1, seconds=seconds)
        for batch, seconds in ((1, 4.0), (2, 1.0), (4, 9.0))
    )
    model = RegressionLatencyModel(LatencyTable(samples=samples))
    law = fit_law(gather(samples))
    for batch in (1, 2):
        expected = min(max(law.seconds(batch, 1), 1.0), 4.0)
        assert model.seconds(DECODE, 16, batch, 1) == pytest.approx(expected)
    assert model.seconds(DECODE, 16, 4, 1) == 9.0


def test_no_claim_is_surer_than_forecasts_of_whole_models_were():
    exact = RegressionLatencyModel(table())
    for shape in ((4, 256), (3, 200)):
        assert exact.estimate(PREFILL, 16, *shape).relative_deviation >= LEAST_DEVIATION
    file = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "fit-ablation.json"
    found = [
        row["p95"]
        for row in json.loads(file.read_text(encoding="utf-8"))["tables"][0]["rows"]
        if row["tables"] == "whole model" and row["law"] == "piecewise"
    ]
    assert len(found) == 2
    assert max(found) <= 100 * LEAST_DEVIATION


def test_prompts_in_whole_milliseconds_on_a_parabola_are_forecast_no_worse_than_by_the_paper():
    def exact(tokens):
        return 5e-4 + 4e-6 * tokens + 1e-11 * tokens**2

    samples = tuple(
        LatencySample(
            phase=PREFILL,
            bits=16,
            batch=1,
            tokens=tokens,
            seconds=round(exact(tokens) * 1e3) * 1e-3,
        )
        for tokens in range(500, 8001, 500)
    )
    errors = {
        law: np.mean([
            abs(model.seconds(PREFILL, 16, 1, tokens) / exact(tokens) - 1.0)
            for tokens in range(750, 8000, 500)
        ])
        for law in ("hinged", "paper")
        for model in [RegressionLatencyModel(LatencyTable(samples=samples), law)]
    }  # fmt: skip
    assert errors["hinged"] < 1.1 * errors["paper"]


def test_steps_of_kernels_for_few_rows_are_recovered():
    def strips(batch, tokens):
        """A kernel that decodes its weights again for every four rows."""
        return 1e-4 + 2e-5 * batch + 6e-5 * -(-batch // 4) + 6e-8 * batch * tokens

    grid = [(1, 16), (1, 64), (1, 384), (2, 16), (2, 64), (2, 384), (4, 16), (4, 48), (4, 96)]
    grid += [(4, 256), (6, 24), (6, 384), (8, 16), (8, 48), (8, 128), (12, 16), (12, 32)]
    grid += [(12, 192), (16, 64)]
    samples = tuple(
        LatencySample(
            phase=DECODE, bits=4, batch=batch, tokens=tokens, seconds=strips(batch, tokens)
        )
        for batch, tokens in grid
    )
    model = RegressionLatencyModel(LatencyTable(samples=samples))
    for batch in (3, 5, 7):
        for tokens in (28, 150):
            found = model.seconds(DECODE, 4, batch, tokens)
            assert found == pytest.approx(strips(batch, tokens), rel=0.04)
