"""Devices are measured with steps as ranks run them."""

from dataclasses import replace

import pytest
import torch

from llmpq.dist.engine.compiled_steps import CompiledSteps
from llmpq.kernels.cpu.native import has_steps, instruction_set, library
from llmpq.profiler import whole_device
from llmpq.profiler.grid import Shape
from llmpq.profiler.whole_device import DeviceJob
from llmpq.spec.precision import BITS, Phase

JOB = DeviceJob(device=torch.device("cpu"), features=128)


@pytest.mark.skipif(library() is None or not has_steps(instruction_set()), reason="needs AVX2")
@pytest.mark.parametrize("bits", BITS)
def test_decode_steps_are_compiled_as_in_a_rank(bits, monkeypatch):
    steps = []

    def kept(layers, cache):
        steps.append(step_runner_of(layers, cache))
        return steps[-1]

    step_runner_of = whole_device.step_runner_of
    monkeypatch.setattr(whole_device, "step_runner_of", kept)
    with torch.inference_mode():
        layers = whole_device._layers(JOB, "bfloat16", bits, 2)
        shape = Shape(phase=Phase.DECODE, batch=4, tokens=3)
        (found,) = whole_device._trials(JOB, "bfloat16", bits, layers, [shape])
        found.trial.call()
    (step,) = steps
    assert isinstance(step, CompiledSteps)


def test_the_budget_holds_although_one_trial_is_slow():
    now_s = [0.0]

    def taking(seconds):
        def call():
            now_s[0] += seconds

        return whole_device._TimedCall(call)

    slow, *quick = trials = [taking(3.0), *(taking(0.001) for _ in range(20))]
    job = replace(JOB, budget_s=10.0)
    shares = []
    whole_device._run(trials, job, shares.append, lambda: now_s[0])
    prepared_s = 3.0 + 20 * 0.001
    assert now_s[0] - prepared_s <= 10.0
    assert len(slow.seconds) == 1
    assert {len(trial.seconds) for trial in quick} == {whole_device.MAX_ROUNDS}
    assert slow.median_s == pytest.approx(3.0)
    assert shares == sorted(shares)


def test_every_trial_is_timed_once_whatever_the_budget():
    now_s = [0.0]

    def call():
        now_s[0] += 1.0

    trials = [whole_device._TimedCall(call) for _ in range(3)]
    whole_device._run(trials, replace(JOB, budget_s=0.5), lambda _: None, lambda: now_s[0])
    assert [len(trial.seconds) for trial in trials] == [1, 1, 1]


def test_a_master_with_next_to_no_weights_answers():
    # Its parameters and constants are filled: nothing of the meta device is left.
    assert whole_device._master_s(JOB.device) > 0.0


@pytest.mark.skipif(library() is None or not has_steps(instruction_set()), reason="needs AVX2")
def test_scattered_experts_are_read_at_some_rate(monkeypatch):
    job, rounds = replace(JOB, distinct_bytes=2**20), []
    seconds = iter(range(100))
    monkeypatch.setattr(
        whole_device.time, "perf_counter", lambda: rounds.append(0) or next(seconds)
    )
    with torch.inference_mode():
        found = whole_device.gather_bytes_per_s(job, "bfloat16")
    # Of 64 features: a matrix [128, 128] and one [128, 64], with a scale and a zero a group.
    size = 128 * 128 // 2 + 128 * 4 + 128 * 64 // 2 + 128 * 4
    count = -(-(2**20) // size // 8) * 8
    assert found == pytest.approx(count * size)
    assert len(rounds) == 2 * whole_device.GATHER_ROUNDS


def test_without_kernels_no_rate_is_known(monkeypatch):
    monkeypatch.setattr("llmpq.kernels.cpu.experts.library", lambda: None)
    assert whole_device.gather_bytes_per_s(JOB, "bfloat16") is None
