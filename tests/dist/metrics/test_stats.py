"""Busy times of a rank that serves for long."""

from __future__ import annotations

import torch

from llmpq.dist.metrics.stats import MAX_STEPS, StageClock
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import Phase


def test_the_latest_steps_of_each_phase_are_kept_and_no_more():
    clock = StageClock(micro_batching=MicroBatching(prefill=1, decode=4), read_core=lambda _: None)
    clock.record(Phase.PREFILL, 1, 3.0, 16)
    for _ in range(MAX_STEPS):
        clock.record(Phase.DECODE, 4, 9.0)
    for _ in range(MAX_STEPS):
        clock.record(Phase.DECODE, 4, 1.0)
    made = clock.stats(0, torch.device("cpu"))
    assert (made.prefill_s, made.decode_s) == (3.0, 1.0)
    assert made.busy_s == 3.0 + 10.0 * MAX_STEPS
    assert sorted(sample.count for sample in made.work) == [1, MAX_STEPS]
