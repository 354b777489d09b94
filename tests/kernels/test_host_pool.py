"""Experts on threads of their own: the sums of QuantExperts, and threads that end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from helpers.instruction_sets import OWN, RUNNABLE, those, using
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from llmpq.kernels.cpu.experts import HostPool
from llmpq.kernels.cpu.native import has_steps, instruction_set, library
from llmpq.kernels.cpu.step import UnsupportedStepError
from llmpq.kernels.registry import choose_backend
from llmpq.models.adapter import ClampedGate
from llmpq.quant.modules.experts import HostExperts
from llmpq.quant.modules.layer import GatedActivation, QuantExperts, QuantLinear
from llmpq.quant.quantizers.rtn import quantize
from llmpq.spec.precision import default_precision

HAS_STEPS = library() is not None and has_steps(instruction_set())
pytestmark = pytest.mark.skipif(not HAS_STEPS, reason="needs AVX2 and a C compiler")

HIDDEN, FEATURES, COUNT = 64, 32, 13
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}
"""Largest difference, relative to what is expected (norms)."""
OLDER = those([name for name in RUNNABLE if name not in (OWN, "baseline")], "older processor")
GATES = {
    "gated": (GatedActivation(nn.SiLU()), 2),
    "clamped": (ClampedGate(1.702, 0.8), 2),
    "none": (nn.ReLU(), 1),
}
"""What is applied between the matrices, and the outputs of the first for each feature."""


def _random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _linear(rows, columns, seed, dtype, bits, *, bias):
    linear = nn.Linear(columns, rows, bias=bias).requires_grad_(False)
    linear.weight.data = _random(rows, columns, seed=seed) / columns**0.5
    if bias:
        linear.bias.data = _random(rows, seed=seed)
    linear = linear.to(dtype)
    if bits == 16:
        return linear
    backend = choose_backend("cpu", default_precision(bits), dtype, rows, columns)
    return QuantLinear(
        quantize(linear.weight, default_precision(bits), dtype), linear.bias, backend
    )


def _experts(dtype=torch.float32, bits=16, gate="gated", *, bias=False):
    made, wide = GATES[gate]
    return QuantExperts(
        [_linear(wide * FEATURES, HIDDEN, 2 * i, dtype, bits, bias=bias) for i in range(COUNT)],
        [_linear(HIDDEN, FEATURES, 2 * i + 1, dtype, bits, bias=bias) for i in range(COUNT)],
        made,
    )


def _choices(rows, count, seed=3, *, may_be_none=False):
    """Experts of rows, and their weights; the number of experts means none."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(rows, COUNT + may_be_none, generator=generator)
    return scores.topk(count).indices, torch.rand(rows, count, generator=generator)


def _check(experts, resident, rows, count, dtype, threads=2, **options):
    x, (chosen, weights) = _random(rows, HIDDEN, seed=7).to(dtype), _choices(rows, count, **options)
    pool = HostPool(threads)
    try:
        found = HostExperts(experts, resident, pool)(x, chosen, weights)
        jobs = pool.busy[1]
    finally:
        pool.close()
    expected = experts(x, chosen, weights)
    assert found.dtype == dtype
    assert jobs
    difference = (found - expected).float().norm()
    assert difference <= CLOSE[dtype] * expected.float().norm()


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("bits", [3, 4, 8, 16])
@pytest.mark.parametrize("resident", [(), (0, 4, 12)], ids=["none", "some"])
def test_sums_are_those_of_the_experts(bits, dtype, resident):
    experts = _experts(dtype, bits)
    for rows in (1, 2, 9, 40):
        _check(experts, resident, rows, 4, dtype)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biases"])
def test_every_activation(gate, bias):
    _check(_experts(gate=gate, bias=bias), (1, 2), 9, 4, torch.float32)


@pytest.mark.parametrize("name", OLDER)
def test_older_processors(name):
    with using(name):
        _check(_experts(bits=4), (1,), 9, 4, torch.float32)


def test_more_rows_than_a_job_has_room_for():
    _check(_experts(), (3,), 4096, 5, torch.float32)


def test_more_jobs_than_the_ring_has_places():
    experts, pool = _experts(), HostPool(1)
    host = HostExperts(experts, (), pool)
    chosen, weights = (one[:1].contiguous() for one in _choices(4, 2))
    layer = host._layer(torch.float32, HIDDEN, 2)
    rows = [_random(1, HIDDEN, seed=seed) for seed in range(150)]
    sums = [torch.empty(1, HIDDEN) for _ in rows]
    index = chosen.int()
    waits = [pool.submit(layer, (x, index, weights), y) for x, y in zip(rows, sums, strict=True)]
    for wait in reversed(waits):
        wait()
    pool.close()
    expected = experts(torch.cat(rows), chosen.expand(150, 2), weights.expand(150, 2))
    assert torch.allclose(torch.cat(sums), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    resident=st.sets(st.integers(0, COUNT - 1), max_size=COUNT - 1),
    rows=st.integers(1, 30),
    count=st.integers(1, 6),
    threads=st.integers(1, 3),
    seed=st.integers(0, 10**6),
)
def test_any_part_of_the_experts_on_any_threads(resident, rows, count, threads, seed):
    experts = _experts()
    _check(
        experts, sorted(resident), rows, count, torch.float32, threads, seed=seed, may_be_none=True
    )


def test_experts_without_a_kernel_are_computed_by_the_caller(caplog):
    experts, pool = _experts(), HostPool(1)
    experts.gate = nn.Tanh()
    experts.gate_up = nn.ModuleList(
        _linear(FEATURES, HIDDEN, i, torch.float32, 16, bias=False) for i in range(COUNT)
    )
    x, (chosen, weights) = _random(5, HIDDEN), _choices(5, 2)
    with caplog.at_level("INFO", logger="llmpq"):
        found = HostExperts(experts, (1,), pool)(x, chosen, weights)
    pool.close()
    assert torch.allclose(found, experts(x, chosen, weights), rtol=1e-5, atol=1e-6)
    assert "experts run without threads of their own: the activation Tanh" in caplog.text


def _threads():
    return {path.name for path in Path("/proc/self/task").iterdir()}


def test_threads_end_with_the_pool_and_are_on_their_cores():
    before, core = _threads(), min(os.sched_getaffinity(0))
    pool = HostPool(3, [core] * 3)
    own = _threads() - before
    assert len(own) == 3
    for name in own:
        status = Path(f"/proc/self/task/{name}/status").read_text()
        assert f"Cpus_allowed_list:\t{core}\n" in status
    pool.close()
    pool.close()
    assert not own & _threads()


def test_no_threads_without_kernels(monkeypatch):
    monkeypatch.setattr("llmpq.kernels.cpu.experts.library", lambda: None)
    with pytest.raises(UnsupportedStepError, match="no compiled kernels"):
        HostPool(1)


def test_so_many_threads_are_an_error():
    with pytest.raises(UnsupportedStepError, match="found no 1000 threads"):
        HostPool(1000)
