"""Which of many alike cases the gate runs; *slow* runs all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def a_third(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """All pairs, of which the gate runs a third: each value of either where both have three.

    Where a value is a tuple, its items are arguments of their own.
    """
    rows, columns = list(first), list(second)
    return [
        pytest.param(
            *(row if isinstance(row, tuple) else (row,)),
            *(column if isinstance(column, tuple) else (column,)),
            marks=() if (i + j) % 3 == 0 else pytest.mark.slow,
        )
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]
