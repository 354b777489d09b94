"""A worker does not load what it never uses."""

import subprocess
import sys

import pytest
import torch

UNUSED = ("scipy.", "accelerate", "sympy", "torch._dynamo", "torch.distributed.tensor", "triton.")
WORKER = f"""
import sys
from llmpq.dist.block_unused_imports import import_transformers
import_transformers()
import llmpq.dist.launch.rank_tasks
print(*[name for name, module in sys.modules.items() if name.startswith({UNUSED}) and module])
import torch
print(torch.distributed.is_available())
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA devices use some of them")
def test_a_worker_of_a_cpu_loads_no_compiler_and_no_sharded_tensors():
    loaded = subprocess.run(
        [sys.executable, "-c", WORKER], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.splitlines() == ["", "True"]


def test_a_process_that_starts_ranks_loads_neither_torch_nor_numpy():
    code = (
        "import sys; import llmpq.cli.commands.dist, llmpq.dist.launch.worker; print(*sys.modules)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"torch", "transformers", "numpy", "tqdm", "asyncio"} & set(loaded.stdout.split())
