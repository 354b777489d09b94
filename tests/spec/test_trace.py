"""Traces: both layouts, their mistakes, and drawn ones."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean, stdev

import pytest
from helpers.builders import uniform, write_trace

from llmpq.errors import SpecError
from llmpq.spec.workload import (
    TraceRequest,
    constant,
    draw_arrivals,
    draw_trace,
    load_trace,
    scale_rate,
    slice_trace,
    with_arrivals,
)


def test_our_own_layout_round_trips(tmp_path):
    trace = draw_trace(50, uniform(1, 9), constant(4), requests_per_s=3.0, seed=2)
    path = tmp_path / "trace.csv"
    write_trace(path, trace, ["seed 2"])
    assert load_trace(path) == trace
    assert path.read_text().startswith("# seed 2\narrival_s,prompt_tokens,new_tokens\n")


def test_the_azure_layout_counts_from_its_first_request(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = load_trace(path)
    assert first == TraceRequest(arrival_s=0, prompt_tokens=374, new_tokens=44)
    assert second.arrival_s == pytest.approx(4.314579)


def test_poisson_arrivals_have_the_given_rate():
    trace = draw_trace(20_000, constant(1), constant(1), requests_per_s=5.0, seed=1)
    assert len(trace) / trace[-1].arrival_s == pytest.approx(5, rel=0.03)
    assert all(item.arrival_s == 0 for item in draw_trace(5, constant(1), constant(1)))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "'header': found 'nothing'"),
        ("a,b,c\n", "'header': found 'a,b,c', expected arrival_s,"),
        ("arrival_s,prompt_tokens,new_tokens\n", "found no rows"),
        ("arrival_s,prompt_tokens,new_tokens\n1,2\n", "line 2: found 2 columns"),
        ("arrival_s,prompt_tokens,new_tokens\n-1,2,3\n", "'arrival_s': found '-1'"),
        ("arrival_s,prompt_tokens,new_tokens\n0,0,3\n", "'prompt_tokens': found '0'"),
        ("arrival_s,prompt_tokens,new_tokens\n0,2,x\n", "'new_tokens': found 'x'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,1\n", "'TIMESTAMP': found 'now'"),
    ],
)
def test_malformed_traces_name_line_and_field(tmp_path, text, found):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(SpecError, match=found):
        load_trace(path)


def test_the_mooncake_layout_has_milliseconds_and_hashes(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    path.write_text(
        '{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [4, 9]}\n'
        '{"timestamp": 0, "input_length": 3, "output_length": 2, "round": 1}\n'
    )
    assert load_trace(path) == (
        TraceRequest(arrival_s=0.0, prompt_tokens=3, new_tokens=2),
        TraceRequest(arrival_s=3.0, prompt_tokens=600, new_tokens=5, hash_ids=(4, 9)),
    )


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("[1]", "mooncake.jsonl:1: expected a JSON object"),
        ("{", "mooncake.jsonl:1: expected a JSON object"),
        ('{"timestamp": -1}', "'timestamp': found -1"),
        ('{"timestamp": true}', "'timestamp': found True"),
        ('{"timestamp": 1, "input_length": 0}', "'input_length': found 0"),
        ('{"timestamp": 1, "input_length": 1}', "'output_length': found None"),
        ('{"timestamp": 1, "hash_ids": [1.5]}', r"'hash_ids': found \[1.5\]"),
        (
            '{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1]}',
            "found .1 blocks",
        ),
        ("", "found no requests"),
    ],
)
def test_malformed_mooncake_lines_name_line_and_field(tmp_path, line, found):
    path = tmp_path / "mooncake.jsonl"
    path.write_text(line)
    with pytest.raises(SpecError, match=found):
        load_trace(path)


def test_rate_is_scaled_and_a_slice_begins_at_zero():
    trace = [TraceRequest(arrival_s=2.0 * n, prompt_tokens=1 + n, new_tokens=1) for n in range(5)]
    assert [item.arrival_s for item in scale_rate(trace, 4.0)] == [0.0, 0.5, 1.0, 1.5, 2.0]
    part = slice_trace(trace, 1, 3)
    assert [(item.arrival_s, item.prompt_tokens) for item in part] == [(0.0, 2), (2.0, 3)]
    assert len(slice_trace(trace, 2, None)) == 3
    with pytest.raises(SpecError, match="slice 9:"):
        slice_trace(trace, 9, None)
    with pytest.raises(SpecError, match="rate scale of 0"):
        scale_rate(trace, 0.0)


@pytest.mark.parametrize(
    ("name", "cv", "expected"), [("poisson", 2.0, 1.0), ("gamma", 1.0, 1.0), ("gamma", 3.0, 3.0)]
)
def test_gaps_have_the_given_rate_and_variation(name, cv, expected):
    times = draw_arrivals(name, 40_000, 5.0, cv=cv, seed=3)
    gaps = [late - early for early, late in pairwise([0.0, *times])]
    mean = fmean(gaps)
    assert mean == pytest.approx(0.2, rel=0.05)
    assert stdev(gaps) / mean == pytest.approx(expected, rel=0.06)


def test_two_states_keep_the_mean_rate_and_are_bursty():
    times = draw_arrivals("two_state", 60_000, 5.0, seed=1)
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.1)
    counts = [0] * (int(times[-1] / 10) + 1)
    for time_s in times:
        counts[int(time_s / 10)] += 1
    assert stdev(counts) ** 2 / fmean(counts) > 5  # 1 for Poisson


def test_arrivals_replace_those_of_a_trace():
    trace = [TraceRequest(arrival_s=9.0, prompt_tokens=1 + n, new_tokens=1) for n in range(2)]
    found = with_arrivals(trace, [1.0, 2.0])
    assert [(item.arrival_s, item.prompt_tokens) for item in found] == [(1.0, 1), (2.0, 2)]
    with pytest.raises(SpecError, match="found 'weekly', expected one of poisson"):
        draw_arrivals("weekly", 1, 1.0)
    with pytest.raises(SpecError, match="rate of 0"):
        draw_arrivals("poisson", 1, 0.0)
