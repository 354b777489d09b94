"""Devices are measured with steps as ranks run them."""

import pytest
import torch

from llmpq.dist.engine.compiled_steps import CompiledSteps
from llmpq.kernels.cpu.native import has_bf16_products, library
from llmpq.profiler import whole_device
from llmpq.profiler.grid import Shape
from llmpq.profiler.whole_device import DeviceJob
from llmpq.spec.precision import BITS, Phase

JOB = DeviceJob(device=torch.device("cpu"), features=128)


@pytest.mark.skipif(library() is None or not has_bf16_products(), reason="no compiled steps here")
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
