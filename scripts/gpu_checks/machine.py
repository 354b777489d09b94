"""What the machine is and what runs on it at all: versions, Triton, NCCL."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from llmpq.kernels import BACKENDS
from llmpq.kernels.gpu.triton_int import launch_failure, why_missing
from scripts.gpu_checks.harness import FailedError, Row, Setting, SkippedError

PACKAGES = ("torch", "transformers", "triton", "bitsandbytes", "numpy", "safetensors")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def environment(setting: Setting) -> list[Row]:
    """Versions and the GPU; fails when there is none."""
    rows: list[Row] = [{"what": "python", "found": platform.python_version()}]
    rows += [{"what": name, "found": _version(name)} for name in PACKAGES]
    rows.append({"what": "backends", "found": " ".join(BACKENDS)})
    if setting.device.type != "cuda":
        return rows
    if not torch.cuda.is_available():
        raise FailedError("torch finds no CUDA device", rows)
    properties = torch.cuda.get_device_properties(setting.device)
    rows += [
        {"what": "gpu", "found": properties.name},
        {"what": "compute capability", "found": f"{properties.major}.{properties.minor}"},
        {"what": "processors", "found": properties.multi_processor_count},
        {"what": "memory, bytes", "found": properties.total_memory},
        {"what": "cuda", "found": torch.version.cuda},
    ]
    return rows


def triton_runs(setting: Setting) -> list[Row]:
    """A trial product in every dtype; without it there are no 3 bits on a GPU."""
    missing = why_missing("triton")
    if missing is not None:
        raise SkippedError(missing)
    rows: list[Row] = []
    for dtype in DTYPES:
        found = launch_failure(setting.device, dtype)
        rows.append({"dtype": str(dtype), "found": found or "runs"})
    if setting.device.type == "cpu" and "not interpreting" in str(rows[0]["found"]):
        raise SkippedError(str(rows[0]["found"]))
    if any(row["found"] != "runs" for row in rows):
        raise FailedError("Triton is installed and its kernels do not run", rows)
    return rows


def nccl(setting: Setting) -> list[Row]:
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
    return [{"what": "nccl", "found": ".".join(map(str, torch.cuda.nccl.version()))}]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
