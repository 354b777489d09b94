"""What the machine is and what runs on it at all: versions, Triton, speeds, NCCL."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from llmpq.kernels import BACKENDS
from llmpq.kernels.gpu.triton_int import launch_failure, why_missing
from scripts.gpu_checks.harness import FailedError, Row, Setting, SkippedError

PACKAGES = ("torch", "transformers", "triton", "bitsandbytes", "numpy", "safetensors")
TOOLS = ("gcc", "cc", "nvcc", "compute-sanitizer")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COPIED_BYTES = 1 << 30
ATTENTION = {0: "math", 1: "flash", 2: "memory-efficient", 3: "cuDNN"}
"""``torch.nn.attention.SDPBackend`` by number."""


def environment(setting: Setting) -> Iterator[Row]:
    """Versions, the GPU, which attention torch chooses, and whether Triton runs; needs a GPU."""
    yield _found("python", platform.python_version())
    yield _found("cores", len(os.sched_getaffinity(0)))
    for name in PACKAGES:
        yield _found(name, _version(name))
    for name in TOOLS:
        yield _found(name, shutil.which(name) or "not found")
    yield _found("backends", " ".join(BACKENDS))
    if setting.device.type == "cuda":
        yield from _gpu(setting.device)
    yield from _triton(setting)


def _gpu(device: torch.device) -> Iterator[Row]:
    if not torch.cuda.is_available():
        raise FailedError("torch finds no CUDA device")
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    yield _found("gpu", properties.name)
    yield _found("compute capability", f"{properties.major}.{properties.minor}")
    yield _found("processors", properties.multi_processor_count)
    yield _found("memory, bytes: free, all", f"{free} {total}")
    yield _found("cuda", torch.version.cuda)
    yield _found("cuDNN", torch.backends.cudnn.version())
    for query in ("driver_version", "clocks.sm,clocks.mem,clocks.max.sm,power.limit"):
        yield _found(query, _nvidia_smi(query))
    for cudnn in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        name = "attention of a masked token" + (", cuDNN allowed" if cudnn else "")
        yield _found(name, _attention_choice(device))
    yield _found("copy, GB/s read and written", round(2 * copied_bytes_per_s(device) / 1e9, 1))
    yield _found("bf16 product, TFLOP/s", round(_product_flops(device) / 1e12, 1))


def _attention_choice(device: torch.device) -> str:
    query = torch.randn(16, 32, 1, 128, device=device, dtype=torch.bfloat16)
    key = torch.randn(16, 32, 256, 128, device=device, dtype=torch.bfloat16)
    mask = torch.ones(16, 1, 1, 256, device=device, dtype=torch.bool)
    number = int(torch._fused_sdp_choice(query, key, key, attn_mask=mask))
    scaled_dot_product_attention(query, key, key, attn_mask=mask)
    return ATTENTION.get(number, str(number))


def copied_bytes_per_s(device: torch.device) -> float:
    """Return the bytes a second that a copy inside the device reads; it writes as many."""
    source = torch.ones(COPIED_BYTES if device.type == "cuda" else 1 << 20, dtype=torch.uint8)
    source = source.to(device)
    target = torch.empty_like(source)
    return source.nbytes / best_s(lambda: target.copy_(source), device)


def _product_flops(device: torch.device) -> float:
    x = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    return 2 * 8192**3 / best_s(lambda: x @ x, device)


def best_s(work: Callable[[], object], device: torch.device, rounds: int = 5) -> float:
    """Return the least seconds of some rounds, after one that is not counted."""
    taken = []
    for _ in range(rounds + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def _nvidia_smi(query: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return (done.stdout or done.stderr).strip().replace("\n", "; ")


def _triton(setting: Setting) -> Iterator[Row]:
    """A trial product in every dtype; without it there are no 3 bits on a GPU."""
    missing = why_missing("triton")
    if missing is not None or setting.device.type != "cuda":
        yield _found("Triton", missing or "not tried on a CPU")
        return
    failures = [launch_failure(setting.device, dtype) for dtype in DTYPES]
    for dtype, failure in zip(DTYPES, failures, strict=True):
        yield _found(f"Triton, {dtype}", failure or "runs")
    if any(failures):
        raise FailedError("Triton is installed and its kernels do not run")


def _found(what: str, found: object) -> Row:
    return {"what": what, "found": found}


def nccl(setting: Setting) -> Iterator[Row]:
    """Whether NCCL is there and one rank of it works; the runtime itself speaks gloo."""
    if setting.device.type != "cuda":
        raise SkippedError("no CUDA device")
    if not dist.is_nccl_available():
        raise SkippedError("this torch was built without NCCL")
    torch.cuda.set_device(setting.device)
    store = dist.FileStore(str(setting.folder / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        total = torch.full((4,), 3.0, device=setting.device)
        dist.all_reduce(total)
        if total.tolist() != [3.0] * 4:
            raise FailedError(f"all_reduce of one rank changed threes to {total.tolist()}")
    finally:
        dist.destroy_process_group()
    yield _found("nccl", ".".join(map(str, torch.cuda.nccl.version())))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
