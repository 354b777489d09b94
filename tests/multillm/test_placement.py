"""Where plans of an application get their devices."""

from __future__ import annotations

import pytest

from llmpq.multillm.planner.application import _block


@pytest.mark.parametrize(
    ("taken", "count", "expected"),
    [
        ({0}, 2, {2, 3}),
        ({0, 2}, 2, {4, 5}),
        ({0}, 4, {4, 5, 6, 7}),
        ({0, 2, 4, 6}, 2, None),
        ({0, 4}, 4, None),
    ],
)
def test_devices_of_a_plan_are_an_aligned_block_where_one_is_free(taken, count, expected):
    found = set(_block(range(8), count, taken))
    assert len(found) == count
    assert not found & taken
    assert expected is None or found == expected
