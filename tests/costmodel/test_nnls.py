import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.costmodel.tables.latency import fit_relative, solve_nnls


def relative_error(features, seconds, coefficients):
    return float((((features @ coefficients - seconds) / seconds) ** 2).sum())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), columns=st.integers(1, 5), noise=st.sampled_from([0.0, 0.3]))
def test_no_feasible_neighbour_fits_better(seed, columns, noise):
    rng = np.random.default_rng(seed)
    features = rng.uniform(0, 10, (columns + 4, columns))
    truth = rng.uniform(0, 2, columns) * (rng.random(columns) < 0.7) + 1e-3
    seconds = features @ truth * np.exp(rng.normal(0, noise, len(features))) + 1e-6
    found = fit_relative(features, seconds)
    best = relative_error(features, seconds, found)
    assert found.min() >= 0
    # The problem is convex: a minimum that no feasible step along a column improves is global
    # up to the steps' size; random feasible directions guard the rest.
    for _ in range(50):
        other = np.maximum(found + rng.normal(0, 0.05, columns), 0)
        assert relative_error(features, seconds, other) >= best - 1e-6


def test_exact_data_are_recovered_over_many_magnitudes():
    rng = np.random.default_rng(0)
    batch, tokens = rng.integers(1, 33, 40), rng.integers(16, 2048, 40)
    features = np.stack([np.ones(40), batch, batch * tokens, batch * tokens**2.0], axis=1)
    truth = np.array([1e-4, 0.0, 2e-6, 3e-11])
    assert fit_relative(features, features @ truth) == pytest.approx(truth, rel=1e-5, abs=1e-12)


def test_one_sample_is_explained_by_the_leftmost_feature():
    assert list(fit_relative(np.array([[4.0, 1.0]]), np.array([2.0]))) == [0.5, 0.0]


def test_a_column_of_zeros_gets_no_coefficient():
    found = fit_relative(np.array([[0.0, 1.0], [0.0, 2.0]]), np.array([1.0, 2.0]))
    assert list(found) == [0.0, pytest.approx(1.0)]


def test_small_samples_count_as_much_as_large_ones():
    features = np.array([[1.0], [1.0]])
    middle = fit_relative(features, np.array([1.0, 100.0]))[0]
    assert middle < 2  # plain least squares would say 50.5


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
