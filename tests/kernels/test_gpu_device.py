"""Opening an accelerator, and which device the choice of a kernel asks about; without one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmpq.calibration.stats import Moments
from llmpq.dist.engine import engine
from llmpq.evals import evaluate
from llmpq.indicator import rounding
from llmpq.kernels import base
from llmpq.kernels.base import exact_dtype, open_device
from llmpq.kernels.gpu import cuda, triton_int
from llmpq.kernels.registry import choose_backend
from llmpq.quant.loading import loader
from llmpq.quant.loading.loader import load_stage
from llmpq.spec.precision import default_precision


@pytest.fixture
def current(monkeypatch):
    """GPUs that count which of them is made the current one; GPU 0 is at first."""
    chosen = [0]
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1])
    return chosen


def test_opening_a_gpu_disables_cudnn_attention(current, monkeypatch):
    enabled = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", enabled.append)
    assert open_device(torch.device("cpu")) == torch.device("cpu")
    assert (current, enabled) == ([0], [])
    assert open_device(torch.device("cuda:1")) == torch.device("cuda:1")
    assert (current, enabled) == ([0, 1], [False])
    assert open_device(torch.device("cuda")) == torch.device("cuda:1")


@pytest.fixture
def two_gpus(monkeypatch):
    """GPU 0 is too old for every kernel, GPU 1 is not; returns the devices that were tried."""
    tried = []

    def failure(device, dtype):
        tried.append(device)
        return None if device.index == 1 else "too old"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: (9, 0) if device.index == 1 else (6, 0)
    )
    monkeypatch.setattr(triton_int, "launch_failure", failure)
    return tried


@pytest.mark.parametrize(
    ("bits", "dtype", "kernel"),
    [
        (3, torch.bfloat16, "triton_int"),
        (4, torch.bfloat16, "cuda_int4"),
        (4, torch.float16, "triton_int"),
        (8, torch.bfloat16, "triton_int"),
    ],
)
def test_a_kernel_is_chosen_for_the_gpu_that_is_named(two_gpus, monkeypatch, bits, dtype, kernel):
    monkeypatch.setattr(triton_int, "why_missing", lambda _: "not installed")
    found = [
        choose_backend(torch.device("cuda", index), default_precision(bits), dtype, 256, 256).name
        for index in (0, 1)
    ]
    assert found == ["reference", kernel]
    assert {torch.device("cuda", 0), torch.device("cuda", 1)} >= set(two_gpus)


def test_a_capability_is_that_of_the_gpu_that_is_named(two_gpus):
    assert not cuda._is_offered("cuda_int8", torch.device("cuda", 0))
    assert cuda._is_offered("cuda_int8", torch.device("cuda", 1))


def test_the_trial_of_triton_runs_on_the_numbered_gpu(current, monkeypatch):
    tried = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton_int, "why_missing", lambda _: None)
    monkeypatch.setattr(triton_int, "_try_once", lambda device, _: tried.append(device))
    current.append(1)
    for name in ("cuda", "cuda:0"):
        triton_int.launch_failure(torch.device(name), torch.float16)
    assert tried == [torch.device("cuda", 1), torch.device("cuda", 0)]


def test_every_thread_that_loads_opens_the_device(tiny_model, monkeypatch):
    """The reader, and the threads that prepare layers: each starts with GPU 0 otherwise."""
    opened = []
    monkeypatch.setattr(loader, "open_device", opened.append)
    folder = tiny_model("llama", seed=1)
    load_stage(folder, 0, 3, [3, 4, 8], dtype=torch.float32, device="cpu", backend="reference")
    assert len(opened) > 1
    assert set(opened) == {torch.device("cpu")}


@pytest.mark.parametrize(
    ("name", "has_fp64", "expected"),
    [
        ("cpu", True, torch.float64),
        ("cuda:0", True, torch.float64),
        ("mps", True, torch.float32),
        ("xpu:0", False, torch.float32),
        ("xpu:0", True, torch.float64),
    ],
)
def test_sums_are_float64_where_the_device_has_it(monkeypatch, name, has_fp64, expected):
    found = SimpleNamespace(has_fp64=has_fp64)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _: found)
    assert exact_dtype(torch.device(name)) is expected


class NoFloat64(TorchDispatchMode):
    """Refuses float64, as Metal does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype is torch.float64:
            raise TypeError(f"{func} makes float64")
        return result


def _evaluate() -> None:
    scores = torch.randn(3, 8).log_softmax(-1)
    evaluate.Tally().add(scores, torch.tensor([1, 2, 3]), scores)


SUMS: dict[str, Callable[[], object]] = {
    "evaluation": _evaluate,
    "step sizes": lambda: rounding.mean_squared_step(torch.randn(16, 64), 4),
    "rounding errors": lambda: rounding.squared_error(torch.randn(16, 64), 4, torch.float32),
    "moments": lambda: Moments(8).add(torch.randn(4, 8)),
}


@pytest.mark.parametrize("what", SUMS)
def test_a_device_without_float64_is_not_asked_for_it(monkeypatch, what):
    with pytest.raises(TypeError, match="float64"), NoFloat64():
        SUMS[what]()
    for module in (base, evaluate, rounding):
        monkeypatch.setattr(module, "exact_dtype", lambda _: torch.float32)
    monkeypatch.setattr("llmpq.calibration.stats.exact_dtype", lambda _: torch.float32)
    with NoFloat64():
        SUMS[what]()


def test_a_draw_on_such_a_device_is_that_of_a_cpu(monkeypatch):
    """float32 sums over a vocabulary would draw other tokens; the scores go to the host."""
    moved = []

    class Scores(torch.Tensor):
        def cpu(self):
            moved.append(self.shape)
            return super().cpu()

    monkeypatch.setattr(engine, "exact_dtype", lambda _: torch.float32)
    scores = torch.randn(100)
    own = scores.as_subclass(Scores)
    found = [engine._draw(own[None], [place / 10]).item() for place in range(10)]
    assert len(moved) == 10
    monkeypatch.undo()
    assert found == [engine._draw(scores[None], [place / 10]).item() for place in range(10)]
