"""Simulation of one worker with chunked prefill."""

import pytest

from llmpq.batching.engine_scheduler import EngineLimits
from llmpq.spec.trace import TraceRequest
from scripts.reproduce.iterations import simulate_iterations

LIMITS = EngineLimits(token_budget=4, max_sequences=8, num_blocks=64, block_size=4)


def _request(arrival_s, prompt, new):
    return TraceRequest(arrival_s=arrival_s, prompt_tokens=prompt, new_tokens=new)


def test_single_request_takes_its_chunks_and_steps():
    report = simulate_iterations(lambda _: 1.0, [_request(2.0, 10, 5)], LIMITS)
    (record,) = report.requests
    assert (record.start_s, record.first_token_s, record.end_s) == (2.0, 5.0, 9.0)
    assert (report.iterations, report.makespan_s, report.work_s) == (7, 7.0, 7.0)


def test_request_that_arrives_during_an_iteration_is_in_the_next():
    trace = [_request(0.0, 4, 4), _request(0.5, 1, 1)]
    late = simulate_iterations(lambda _: 1.0, trace, LIMITS).requests[1]
    assert (late.start_s, late.end_s) == (1.0, 2.0)


def test_work_is_the_sum_of_iteration_costs():
    trace = [_request(0.0, 3, 2), _request(0.0, 3, 2)]
    report = simulate_iterations(lambda chunks: sum(c.count for c in chunks) / 8, trace, LIMITS)
    assert report.work_s == pytest.approx(8 / 8)
    assert report.preemptions == 0
