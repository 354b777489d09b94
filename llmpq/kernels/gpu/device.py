"""Opening an accelerator: every rank, profiler and check calls ``open_device`` for its device."""

from __future__ import annotations

import torch


def open_device(device: torch.device) -> torch.device:
    """Make a device the current one of this thread; return it with its number.

    A thread starts with GPU 0 as its current device, whatever other threads have chosen: Triton
    would launch there, and libraries would allocate there. Each thread that uses a GPU calls this.

    On CUDA, cuDNN's attention is disabled for the process. torch 2.11 prefers it on compute
    capability 9.0 and above, and it builds an execution plan of 0.1 to 0.5 s for every new shape
    (huggingface/transformers#48163, modelscope/FunASR#3704); shapes of a step are new all the time.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
        device = numbered(device)
        torch.cuda.set_device(device.index)
    elif device.type == "xpu":
        device = numbered(device)
        torch.xpu.set_device(device.index)
    return device


def numbered(device: torch.device) -> torch.device:
    """Return a device with its number: that of the current one where it has none."""
    if ":" in str(device) or device.type not in ("cuda", "xpu"):
        return device
    current = torch.cuda.current_device() if device.type == "cuda" else torch.xpu.current_device()
    return torch.device(device.type, current)


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of long sums on a device: float64, or float32 where there is none.

    Metal has no float64, and neither have Intel's Arc GPUs.
    """
    if device.type == "mps":
        return torch.float32
    if device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64:
        return torch.float32
    return torch.float64
