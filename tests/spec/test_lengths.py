"""Length distributions: laws of probability, and files that say what is wrong with them."""

from __future__ import annotations

import json
import math
import random

import pytest
from helpers.builders import uniform
from hypothesis import given
from hypothesis import strategies as st

from llmpq.errors import SpecError
from llmpq.spec.fields import to_json
from llmpq.spec.workload import (
    LengthDistribution,
    constant,
    empirical,
    load_lengths,
    truncated_normal,
)


@given(mean=st.floats(1, 300), std=st.floats(0.5, 200), longest=st.integers(1, 600))
def test_a_truncated_normal_is_a_distribution_inside_its_bounds(mean, std, longest):
    if longest < mean - 20 * std or mean + 20 * std < 1:
        return  # nothing is left of it
    found = truncated_normal(mean, std, longest)
    assert math.fsum(found.probabilities) == pytest.approx(1)
    assert 1 <= found.lengths[0] <= found.mean <= found.longest <= longest


def test_exegpt_s_summaries_have_the_99th_percentile_of_its_table_3():
    assert truncated_normal(32, 13, 80).quantile(0.99) == pytest.approx(63, abs=1)
    assert truncated_normal(64, 30, 160).quantile(0.99) == pytest.approx(137, abs=4)


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60), share=st.floats(0, 1))
def test_quantiles_of_observations_are_observations(lengths, share):
    found = empirical(lengths)
    value = found.quantile(share)
    assert value in lengths
    assert sum(length <= value for length in lengths) / len(lengths) >= share - 1e-9
    assert found.mean == pytest.approx(sum(lengths) / len(lengths))


def test_samples_follow_the_law():
    law = truncated_normal(40, 10, 80)
    drawn = law.sample(20_000, random.Random(3))
    assert sum(drawn) / len(drawn) == pytest.approx(law.mean, rel=0.01)
    assert min(drawn) >= 1
    assert max(drawn) <= 80


def test_simple_laws():
    assert constant(7).mean == 7
    assert constant(7).std == 0
    assert uniform(1, 20).mean == pytest.approx(10.5)


def test_files_round_trip(tmp_path):
    law = empirical([3, 3, 9])
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps(to_json(law)))
    assert load_lengths(path) == law
    path.write_text('{"schema": 1, "observed": [3, 3, 9]}')
    assert load_lengths(path) == law
    path.write_text('{"schema": 1, "truncated_normal": {"mean": 32, "std": 13, "longest": 80}}')
    assert load_lengths(path) == truncated_normal(32, 13, 80)


@pytest.mark.parametrize(
    "text",
    [
        '{"schema": 1, "observed": []}',
        '{"schema": 1, "observed": [0]}',
        '{"schema": 1, "observed": [1.5]}',
        '{"schema": 1, "lengths": [2, 1], "probabilities": [0.5, 0.5]}',
        '{"schema": 1, "lengths": [1, 2], "probabilities": [0.5, 0.4]}',
        '{"schema": 1, "lengths": [1, 2], "probabilities": [1]}',
        '{"schema": 1, "observed": [1], "more": 2}',
        '{"schema": 1, "truncated_normal": {"mean": 32, "std": 0, "longest": 80}}',
    ],
)
def test_bad_files_are_refused(tmp_path, text):
    path = tmp_path / "lengths.json"
    path.write_text(text)
    with pytest.raises(SpecError):
        load_lengths(path)


def test_a_distribution_must_add_up():
    with pytest.raises(SpecError, match=r"add up to 0\.9"):
        LengthDistribution(lengths=(1, 2), probabilities=(0.5, 0.4))
