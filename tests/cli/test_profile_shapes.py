"""Which shapes `llmpq-profile layer` times: the planned grid, one's own, or both."""

from __future__ import annotations

import argparse

import pytest

from llmpq.cli.measuring.layer import POINTS, add_parser, shapes_of
from llmpq.spec.precision import Phase

PROFILE = ["layer", "--model", "facebook/opt-125m", "--output", "t.csv"]
OWN = ["--batches", "3", "5", "--prompt_tokens", "20", "--context_tokens", "28", "80"]
OWN_SHAPES = {
    (Phase.PREFILL, 3, 20),
    (Phase.PREFILL, 5, 20),
    (Phase.DECODE, 3, 28),
    (Phase.DECODE, 3, 80),
    (Phase.DECODE, 5, 28),
    (Phase.DECODE, 5, 80),
}


def shapes(*words):
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    found = shapes_of(parser.parse_args([*PROFILE, *words]))
    assert len(set(found)) == len(found)
    return {(one.phase, one.batch, one.tokens) for one in found}


@pytest.mark.parametrize(("words", "points"), [([], POINTS), (["--points", "12"], 12)])
def test_the_planned_grid_alone(words, points):
    found = shapes(*words)
    assert [sum(phase is one for phase, _, _ in found) for one in Phase] == [points, points]


def test_own_sizes_alone():
    assert shapes(*OWN) == OWN_SHAPES


def test_own_sizes_beside_the_planned_grid():
    assert shapes(*OWN, "--points", "12") == OWN_SHAPES | shapes("--points", "12")
