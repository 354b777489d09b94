import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmpq.costmodel.tables.bounds import measured_bounds
from llmpq.costmodel.tables.clock import RUN_NOISE, relative_noise, tick_of
from llmpq.costmodel.tables.laws import Samples
from llmpq.spec.precision import Phase


def samples(points, noise=None):
    shapes = sorted(points)
    seconds = np.array([points[shape] for shape in shapes])
    return Samples(
        phase=Phase.DECODE,
        batch=np.array([float(batch) for batch, _ in shapes]),
        tokens=np.array([float(tokens) for _, tokens in shapes]),
        seconds=seconds,
        noise=np.full(len(shapes), 0.01) if noise is None else np.array(noise),
    )


sizes = st.tuples(st.integers(1, 12), st.integers(1, 12))


@given(points=st.dictionaries(sizes, st.floats(1e-6, 1e3), min_size=1, max_size=30), asked=sizes)
def test_bounds_never_cross_and_pooled_values_respect_the_order(points, asked):
    found = measured_bounds(samples(points))
    least, most = found.at(*asked)
    assert least <= most
    for index in range(len(points)):
        after = (found.batch >= found.batch[index]) & (found.tokens >= found.tokens[index])
        assert (found.seconds[after] >= found.seconds[index] * (1 - 1e-9)).all()


def test_measurements_in_order_stay_what_they_are():
    points = {(1, 1): 1.0, (1, 2): 1.5, (2, 1): 1.2, (2, 2): 2.0}
    found = measured_bounds(samples(points))
    for shape, seconds in points.items():
        assert found.at(*shape) == (seconds, seconds)
    assert found.at(1, 1.5) == (1.0, 1.5)
    assert found.at(3, 3)[1] == np.inf


def test_a_contradiction_is_pooled_and_the_surer_sample_counts_more():
    found = measured_bounds(samples({(1, 1): 2.0, (2, 1): 1.0}, noise=[0.1, 0.01]))
    assert found.seconds[0] == pytest.approx(found.seconds[1])
    assert found.seconds[0] == pytest.approx(1.0, rel=0.01)


def test_total_orders_match_the_pool_adjacent_violators_solution():
    found = measured_bounds(
        samples({(size, 1): float(np.exp(x)) for size, x in enumerate([3, 1, 2, 5, 4], start=1)})
    )
    assert np.log(found.seconds) == pytest.approx([2.0, 2.0, 2.0, 4.5, 4.5])


def test_a_clock_of_whole_milliseconds_is_seen():
    seconds = np.array([1, 2, 2, 3, 4, 5, 7, 9, 11]) * 1e-3
    assert tick_of(seconds) == pytest.approx(np.full(9, 1e-3))
    noise = relative_noise(seconds)
    assert noise[0] == pytest.approx(np.hypot(RUN_NOISE, 1 / np.sqrt(12)))
    assert noise[-1] < 0.04


def test_a_clock_that_grows_coarser_is_seen_where_it_does():
    seconds = np.array([0.9, 1.1, 1.4, 1.7, 3, 4, 5, 6, 7, 8, 9, 11, 12]) * 1e-3
    ticks = tick_of(seconds)
    assert ticks[:4] == pytest.approx(1e-4)
    assert ticks[4:] == pytest.approx(1e-3)


def test_a_fine_clock_adds_nothing():
    seconds = np.random.default_rng(0).uniform(1e-3, 1e-2, 50)
    assert relative_noise(seconds) == pytest.approx(RUN_NOISE, rel=1e-3)
