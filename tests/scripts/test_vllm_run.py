"""The costs of a mixed iteration, from measured operators."""

import pytest

from scripts.reproduce.vllm_run import Attention, Line

POINTS = {
    (0, 0, 1, 16): 2.0, (0, 0, 1, 32): 4.0, (0, 0, 2, 16): 6.0, (0, 0, 2, 32): 8.0,
    (16, 0, 0, 0): 10.0, (32, 0, 0, 0): 20.0, (16, 16, 0, 0): 14.0, (32, 16, 0, 0): 24.0,
    (16, 0, 1, 16): 13.0, (32, 0, 1, 16): 25.0,
}  # fmt: skip


def test_a_line_goes_on_beyond_its_points():
    line = Line({1: 1.0, 3: 5.0})
    assert [line(place) for place in (0, 1, 2, 3, 4)] == [1.0, 1.0, 3.0, 5.0, 7.0]


def test_attention_is_interpolated_in_its_cell():
    attention = Attention(POINTS)
    assert attention.decode(1, 24) == pytest.approx(3.0)
    assert attention.decode(1.5, 24) == pytest.approx(5.0)
    assert attention.prefill(24, 0) == pytest.approx(15.0)
    assert attention.prefill(16, 16) == pytest.approx(14.0)
    assert attention.added(24, 0, 1, 16) == pytest.approx(4.0)
