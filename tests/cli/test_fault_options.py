"""What a run left undone is told, and told by its exit status."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from llmpq.cli.run_options import add_fault_options, outcome, supervision_of
from llmpq.dist.metrics.measurement import Measurement
from llmpq.errors import SpecError

DONE = Measurement(requests=1, generated_tokens=1, latency_s=1.0, load_s=1.0, stages=())


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_fault_options(parser)
    return parser.parse_args(words)


def test_the_defaults_are_those_that_are_promised():
    found = supervision_of(options())
    assert (found.max_restarts, found.drain_timeout_s, found.health) == (3, 30.0, None)
    assert options().bad_prompts == "skip"


@pytest.mark.parametrize("words", [("--max_restarts", "-1"), ("--drain_timeout", "nan")])
def test_numbers_out_of_range_are_refused(words):
    with pytest.raises(SpecError):
        supervision_of(options(*words))


def test_everything_done_is_a_success(capsys):
    assert outcome(DONE) == 0
    assert capsys.readouterr().err == ""


def test_what_was_not_begun_is_counted(capsys):
    assert outcome(replace(DONE, not_served=7)) == 130
    assert "7 requests" in capsys.readouterr().err


def test_refused_prompts_are_named_until_there_are_too_many(capsys):
    refused = tuple(f"prompts: line {number}" for number in range(25))
    assert outcome(replace(DONE, refused=refused)) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 11
    assert told[0].endswith("line 0")
    assert "25 in all" in told[-1]
