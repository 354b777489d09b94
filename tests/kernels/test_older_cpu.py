"""A worker held to an older vector extension must not get a kernel that is wrong there.

The processes of these tests have limits of their own, so ``scripts/check`` runs this file once.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from helpers.instruction_sets import OWN

from llmpq.dist.launch.process_environment import cpu_environment
from llmpq.kernels.cpu import native

PROGRAM = """
import torch
from llmpq.kernels.cpu.native import instruction_set
from llmpq.kernels.registry import choose_backend
from llmpq.quant import quantize
from llmpq.quant.modules.layer import prepack_
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
print(instruction_set(), worst)

torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(256, 128)).to(torch.bfloat16).requires_grad_(False)
plain = module[0].weight.detach().float().clone(), module[0].bias.detach().float().clone()
prepack_(module)
x = torch.randn(2, 256).to(torch.bfloat16)
y = module(x).float()
right = x.float() @ plain[0].T + plain[1]
print(type(module[0]).__name__, float((y - right).norm() / right.norm()))
"""


@pytest.mark.parametrize("cpu_isa", [None, "avx512", "avx2", "sse4"])
def test_few_and_16_bits_are_right_on_every_vector_extension(cpu_isa):
    environment = {**os.environ, **cpu_environment(1, cpu_isa)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    few, stored = (line.split() for line in done.stdout.splitlines())
    name, error = few
    limited = {None: OWN, "avx512": "avx512", "avx2": "avx2", "sse4": "baseline"}[cpu_isa]
    oldest_first = list(reversed(native.FLAGS))
    assert name == min(OWN, limited, key=oldest_first.index)
    assert float(error) < 0.01
    if cpu_isa is not None and native.library() is not None:  # stored in 16 bits and widened
        assert stored[0] == "DenseLinear"
    assert float(stored[1]) < 0.01


@pytest.mark.parametrize(
    ("capability", "has_amx", "has_bf16", "has_vnni", "expected"),
    [
        ("AVX512", True, True, True, "amx"),
        ("AVX512", False, True, True, "avx512_bf16"),
        ("AVX512_CORE", False, False, True, "avx512_vnni"),
        ("AVX512", False, False, False, "avx512"),
        ("AVX2", True, False, True, "avx2_vnni"),
        ("AVX2", False, False, False, "avx2"),
        ("DEFAULT", False, False, False, "baseline"),
        ("NO AVX", False, False, False, "baseline"),
    ],
)
def test_the_newest_instruction_set_is_chosen(
    monkeypatch, capability, has_amx, has_bf16, has_vnni, expected
):
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    monkeypatch.setattr(native, "has_amx", lambda: has_amx)
    monkeypatch.setattr(native, "has_bf16_products", lambda: has_bf16)
    for function in ("has_byte_products", "has_u8_matmul", "has_avx_vnni"):
        monkeypatch.setattr(native, function, lambda: has_vnni)
    assert native.instruction_set() == expected


def test_a_process_held_to_avx2_leaves_vnni_alone(monkeypatch):
    """oneDNN may multiply with AVX-512 where torch is held to AVX2 alone."""
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(native, "has_u8_matmul", lambda: True)
    for found in ({}, {"avx_vnni": False}):
        monkeypatch.setattr("torch.cpu.get_capabilities", lambda found=found: found, raising=False)
        native.has_avx_vnni.cache_clear()
        assert native.instruction_set() == "avx2"
    native.has_avx_vnni.cache_clear()
