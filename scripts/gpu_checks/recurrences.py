"""Mixers of layers with a recurrent state at real sizes, beside the CPU's kernels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from llmpq.dist.metrics.stats import synchronize
from llmpq.kernels.cpu.mixers import DeltaInputs, GatedDelta, Mamba2, ShortConvolution
from llmpq.kernels.gpu.triton_int import launch_failure
from llmpq.kernels.gpu.triton_mixers import TritonConvolution, TritonGatedDelta, TritonMamba2
from scripts.gpu_checks.harness import FailedError, Row, Setting, SkippedError

TOLERANCE = 0.02
"""Of the norm of the outputs: bf16 rounds them on both sides."""
SLOTS = 8
STEPS = {"4 rows of a token": [1, 1, 1, 1], "a prompt of 256": [256], "both": [1, 33, 1]}
Outcome = tuple[Tensor, Tensor, Tensor]


def recurrences(setting: Setting) -> Iterator[Row]:
    """Gated DeltaNet and Mamba 2 on the device, against the CPU's kernels."""
    missing = launch_failure(setting.device, torch.bfloat16)
    if missing is not None:
        raise SkippedError(missing)
    worst = 0.0
    for name, make in (("gated delta", _delta), ("mamba 2", _mamba)):
        for step, counts in STEPS.items():
            here = make(torch.device("cpu"), counts, setting.is_quick)()
            there = make(setting.device, counts, setting.is_quick)
            error = max(
                float((one.cpu().float() - other.float()).norm() / other.float().norm())
                for one, other in zip(there(), here, strict=True)
            )
            worst = max(worst, error)
            times = []
            for _ in range(5):
                start = time.perf_counter()
                there()
                synchronize(setting.device)
                times.append(time.perf_counter() - start)
            milliseconds = round(1e3 * statistics.median(times), 3)
            yield {"mixer": name, "step": step, "error": round(error, 5), "ms": milliseconds}
    if worst > TOLERANCE:
        raise FailedError(f"found an error of {worst:.3g}, expected at most {TOLERANCE:g}")


def _rows(counts: list[int]) -> Tensor:
    """Rows of so many tokens, each with a state."""
    firsts = [sum(counts[:place]) for place in range(len(counts))]
    return torch.tensor([
        [first, count, slot, 0, count, slot]
        for slot, (first, count) in enumerate(zip(firsts, counts, strict=True))
    ])  # fmt: skip


def _delta(device: torch.device, counts: list[int], is_quick: bool) -> Callable[[], Outcome]:
    """In the sizes of Qwen3.5-9B."""
    random = _random(device)
    key_heads, share, dim = (2, 2, 64) if is_quick else (16, 2, 128)
    heads = key_heads * share
    channels, tokens = 2 * key_heads * dim + heads * dim, sum(counts)
    on_cpu = device.type == "cpu"
    convolution = (ShortConvolution if on_cpu else TritonConvolution)(
        random(channels, 1, 4) / 4, None, is_activated=True
    )
    delta = (GatedDelta if on_cpu else TritonGatedDelta)(
        convolution, random(heads), random(heads), random(dim).abs() + 0.5, 1e-6,
        key_heads=key_heads, key_dim=dim,
    )  # fmt: skip
    inputs = DeltaInputs(
        mixed=random(tokens, channels).bfloat16(),
        gate=random(tokens, heads * dim).bfloat16(),
        beta=random(tokens, heads).bfloat16(),
        decay=random(tokens, heads).bfloat16(),
    )
    conv_states, states = random(SLOTS, channels, 4), random(SLOTS, heads, dim, dim)

    def run() -> Outcome:
        own = conv_states.clone(), states.clone()
        return delta(inputs, _rows(counts), *own), *own

    return run


def _mamba(device: torch.device, counts: list[int], is_quick: bool) -> Callable[[], Outcome]:
    """In the sizes of Granite 4.0 H Tiny."""
    random = _random(device)
    heads, head_dim, state = (4, 32, 64) if is_quick else (48, 64, 128)
    width = heads * head_dim
    channels, tokens = width + 2 * state, sum(counts)
    on_cpu = device.type == "cpu"
    convolution = (ShortConvolution if on_cpu else TritonConvolution)(
        random(channels, 1, 4) / 4, random(channels), is_activated=True
    )
    mamba = (Mamba2 if on_cpu else TritonMamba2)(
        convolution, random(heads), random(heads), random(heads), random(width).abs() + 0.5, 1e-6,
        normed=width, groups=1, state_dim=state, limits=(0.0, float("inf")),
    )  # fmt: skip
    joined = random(tokens, width + channels + heads).bfloat16()
    conv_states, states = random(SLOTS, channels, 4), random(SLOTS, heads, head_dim, state)

    def run() -> Outcome:
        own = conv_states.clone(), states.clone()
        return mamba(joined, _rows(counts), *own), *own

    return run


def _random(device: torch.device) -> Callable[..., Tensor]:
    """Return what makes the same numbers on every device."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).to(device)
