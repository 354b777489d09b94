"""A worker does not load what it never uses."""

import importlib.util
import subprocess
import sys

import pytest
import torch

LOADED = (
    "import sys; print(*[name for name in sys.modules if name.startswith(('scipy.', 'triton.'))])"
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.skipif(importlib.util.find_spec("scipy") is None, reason="SciPy is not installed")
def test_a_worker_without_a_gpu_loads_neither_scipy_nor_triton():
    loaded = subprocess.run(
        [sys.executable, "-c", f"import llmpq.dist.launch.worker; {LOADED}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert loaded.stdout.split() == []
