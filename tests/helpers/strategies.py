"""Hypothesis strategies for planning problems."""

from __future__ import annotations

from helpers.builders import random_problem
from hypothesis import strategies as st

tiny_problems = st.integers(min_value=0, max_value=10**6).map(random_problem)
"""Problems that brute force settles in milliseconds; the seed shrinks, the problem replays."""
