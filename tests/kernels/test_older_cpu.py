"""A worker held to an older vector extension must not get a kernel that is wrong there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from llmpq.dist.launch.process_environment import cpu_environment

PROGRAM = """
import torch
from llmpq.kernels.registry import choose_backend
from llmpq.quant import quantize
from llmpq.spec.precision import default_precision

worst = 0.0
for bits in (8, 4, 3):
    precision = default_precision(bits)
    weight = torch.full((64, 128), 0.05, dtype=torch.bfloat16)  # one sign: pairs of products add up
    weight[:, ::3] = 0.02
    packed = quantize(weight, precision, torch.bfloat16)
    backend = choose_backend("cpu", precision, torch.bfloat16, 64, 128)
    x = torch.ones((3, 128), dtype=torch.bfloat16)
    y = backend.linear(x, backend.prepare(packed), None).float()
    right = x.float() @ packed.dequantize(torch.float32).T
    worst = max(worst, float((y - right).norm() / right.norm()))
print(worst)
"""


@pytest.mark.parametrize("cpu_isa", [None, "avx512", "avx2", "sse4"])
def test_few_bits_are_right_on_every_vector_extension(cpu_isa):
    environment = {**os.environ, **cpu_environment(1, cpu_isa)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 0.01
