"""The benchmark of latent attention."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import latent  # noqa: E402

pytestmark = pytest.mark.nightly


def test_rows_compare_the_medians_of_both_ways():
    samples = [
        {"way": way, "context": context, "round": number, "step_ms": ms}
        for context in latent.CONTEXTS
        for way, all_ms in (("as they are", (8.0, 4.0, 6.0)), ("expanded", (12.0, 24.0, 90.0)))
        for number, ms in enumerate(all_ms)
    ]
    assert latent.rows(samples) == [[context, 1.5, 6.0, 4.0] for context in latent.CONTEXTS]
    assert len(latent.COLUMNS) == 4
