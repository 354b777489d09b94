import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmpq.costmodel.tables.latency import Curve, RegressionLatencyModel, gather
from llmpq.costmodel.tables.selection import believed, choose_law
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample, LatencyTable


def test_what_one_sample_gains_alone_is_not_believed_and_what_two_gain_is():
    assert believed(np.array([0.0, 0.3, 0.0, 0.0])) == 0.0
    assert believed(np.array([0.0, 0.3, 0.3, 0.0])) == pytest.approx(1.0)
    assert 0.0 < believed(np.array([0.0, 0.3, 0.1, 0.0])) < 1.0


def test_a_loss_is_never_believed():
    assert believed(np.array([0.1, -0.2])) == 0.0
    assert believed(np.zeros(3)) == 0.0


def test_gains_whose_squares_vanish_are_weighed_all_the_same():
    assert believed(np.array([5e-324, 0.0])) == 0.0
    assert believed(np.array([1e-200, 1e-200])) == pytest.approx(1.0)


@given(
    thousandths=st.lists(st.integers(-1000, 1000), min_size=1, max_size=30),
    factor=st.floats(0.01, 100.0),
)
def test_belief_is_a_share_whatever_the_unit(thousandths, factor):
    gains = np.array(thousandths, dtype=float)
    found = believed(gains)
    assert 0.0 <= found <= 1.0
    assert believed(factor * gains) == pytest.approx(found, abs=1e-6)


def test_prompts_in_whole_milliseconds_on_a_parabola_are_forecast_no_worse_than_by_the_paper():
    def exact(tokens):
        return 5e-4 + 4e-6 * tokens + 1e-11 * tokens**2

    samples = tuple(
        LatencySample(
            phase=Phase.PREFILL, bits=16, batch=1, tokens=tokens,
            seconds=round(exact(tokens) * 1e3) * 1e-3,
        )
        for tokens in range(500, 8001, 500)
    )  # fmt: skip
    table = LatencyTable(samples=samples)
    errors = {
        law: np.mean([
            abs(model.seconds(Phase.PREFILL, 16, 1, tokens) / exact(tokens) - 1.0)
            for tokens in range(750, 8000, 500)
        ])
        for law in ("hinged", "paper")
        for model in [RegressionLatencyModel(table, law)]
    }  # fmt: skip
    assert errors["hinged"] < 1.1 * errors["paper"]


GRID = [(1, 16), (1, 64), (1, 384), (2, 16), (2, 64), (2, 384), (4, 16), (4, 48), (4, 96), (4, 256)]
GRID += [(6, 24), (6, 384), (8, 16), (8, 48), (8, 128), (12, 16), (12, 32), (12, 192), (16, 64)]


def in_strips(batch, tokens, strip=4):
    """A kernel that decodes its weights again for every strip of rows."""
    return 1e-4 + 2e-5 * batch + 6e-5 * -(-batch // strip) + 6e-8 * batch * tokens


def striped(grid, strip=4):
    return gather([
        LatencySample(
            phase=Phase.DECODE, bits=4, batch=batch, tokens=tokens,
            seconds=in_strips(batch, tokens, strip),
        )
        for batch, tokens in grid
    ])  # fmt: skip


def test_strips_of_rows_are_learned_from_batches_inside_them():
    curve = Curve(striped(GRID))
    for batch in (3, 5, 7, 9, 10, 13):
        for tokens in (28, 150):
            assert curve.seconds(batch, tokens) == pytest.approx(in_strips(batch, tokens), rel=0.04)


def test_batches_that_are_powers_of_two_tell_no_strip_from_a_bend():
    grid = [(batch, tokens) for batch in (1, 2, 4, 8, 16) for tokens in (16, 64, 256)]
    choice, _ = choose_law(striped(grid))
    assert choice.strip is None


def test_kernels_without_strips_are_fitted_without():
    choice, _ = choose_law(striped(GRID, strip=1))
    assert choice.strip is None


def test_a_kept_fit_answers_as_the_one_it_was_made_of_strips_and_all():
    samples = striped(GRID)
    curve = Curve(samples)
    again = Curve(samples, curve.arrays())
    assert choose_law(samples)[0].strip == 4
    for shape in ((5, 28), (9, 100), (40, 600)):
        assert again.estimate(*shape) == curve.estimate(*shape)
