"""A worker does not load what it never uses."""

import subprocess
import sys

import torch

UNUSED = ("scipy.",) if torch.cuda.is_available() else ("scipy.", "triton.")
LOADED = f"import sys; print(*[name for name in sys.modules if name.startswith({UNUSED})])"


def test_a_worker_loads_no_scipy_and_without_a_gpu_no_triton():
    loaded = subprocess.run(
        [sys.executable, "-c", f"import llmpq.dist.launch.worker; {LOADED}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert loaded.stdout.split() == []
