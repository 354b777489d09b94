"""Traces: both layouts, their mistakes, and drawn ones."""

from __future__ import annotations

import pytest

from llmpq.errors import SpecError
from llmpq.spec.lengths import constant, uniform
from llmpq.spec.trace import TraceRequest, draw_trace, load_trace, write_trace


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
