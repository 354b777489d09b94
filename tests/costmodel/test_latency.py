import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.costmodel.tables.latency import RegressionLatencyModel, gather
from llmpq.costmodel.tables.laws import fit_hinged, fit_paper
from llmpq.costmodel.tables.nnls import solve_nnls
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
def test_even_absurd_samples_fit_to_something_positive_and_monotone(points, phase, shape, more):
    samples = tuple(
        LatencySample(phase=phase, bits=4, batch=batch, tokens=tokens, seconds=seconds)
        for (batch, tokens), seconds in points.items()
    )
    model = RegressionLatencyModel(LatencyTable(samples=samples))
    here = model.seconds(phase, 4, *shape)
    larger = model.seconds(phase, 4, max(shape[0], more[0]), max(shape[1], more[1]))
    assert 0 < here <= larger * (1 + 1e-12)


@pytest.mark.parametrize("phase", Phase)
def test_a_law_with_tiles_and_a_hinge_is_found_again(phase):
    model = RegressionLatencyModel(table(phase))
    for batch, tokens in ((3, 200), (12, 700), (24, 100), (6, 900)):
        found = model.seconds(phase, 16, batch, tokens)
        assert found == pytest.approx(law(phase, batch, tokens), rel=0.04)


def test_a_step_between_close_samples_is_found_and_nothing_is_smeared_over_it():
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


def test_seconds_that_only_count_sequences_are_priced_too():
    samples = tuple(
        LatencySample(phase=PREFILL, bits=16, batch=batch, tokens=64 // batch, seconds=0.01 * batch)
        for batch in (1, 2, 4, 8, 16, 32)
    )
    model = RegressionLatencyModel(LatencyTable(samples=samples))
    assert model.seconds(PREFILL, 16, 8, 8) == pytest.approx(0.08, rel=0.01)


def test_outside_the_samples_an_answer_says_so_and_is_less_sure():
    model = FITTED[DECODE]
    inside = model.estimate(DECODE, 16, 8, 256)
    near = model.estimate(DECODE, 16, 64, 256)
    far = model.estimate(DECODE, 16, 64, 8192)
    assert not inside.is_extrapolated
    assert near.is_extrapolated
    assert far.is_extrapolated
    assert inside.relative_deviation < near.relative_deviation < far.relative_deviation
    assert inside.seconds == model.seconds(DECODE, 16, 8, 256)


def test_the_deviation_is_about_the_noise():
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


def test_hinges_beat_the_papers_law_where_a_kernel_changes_regime():
    samples = gather(table().samples)

    def error(fitted):
        predicted = fitted.seconds(samples.batch, samples.tokens)
        return float(np.abs(predicted / samples.seconds - 1).mean())

    assert error(fit_hinged(samples, 8)) < 0.2 * error(fit_paper(samples))


def test_a_bitwidth_without_samples_is_a_miss():
    with pytest.raises(ProfileMissError, match=r"no decode samples at 8 bits, only at \[16\]"):
        FITTED[DECODE].seconds(DECODE, 8, 1, 1)


def test_the_same_table_gives_the_same_answers():
    first, again = (RegressionLatencyModel(table(noise=0.1)) for _ in range(2))
    assert first.seconds(PREFILL, 16, 5, 333) == again.seconds(PREFILL, 16, 5, 333)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), columns=st.integers(1, 12))
def test_nnls_meets_the_conditions_of_an_optimum(seed, columns):
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(20, columns)), rng.normal(size=20)
    found = solve_nnls(matrix, target)
    gradient = matrix.T @ (matrix @ found - target)
    assert found.min() >= 0
    assert gradient.min() >= -1e-6  # no coefficient would improve by growing
    assert np.abs(gradient[found > 0]).max(initial=0.0) < 1e-6


@pytest.mark.parametrize("phase", Phase)
def test_a_measured_shape_answers_for_itself(phase):
    measured = table(phase)
    model = RegressionLatencyModel(measured)
    for one in measured.samples:
        found = model.seconds(phase, 16, one.batch, one.tokens)
        assert found == pytest.approx(one.seconds, rel=1e-12)


def test_far_outside_it_claims_no_less_than_it_errs():
    # Learned from small batches, where this kernel waits for memory and costs the same.
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
