"""A worker does not load what it never uses."""

import subprocess
import sys

import pytest
import torch

UNUSED = ("scipy.", "accelerate", "sympy", "torch._dynamo", "torch.distributed.tensor", "triton.")
WORKER = f"""
import gc, sys
from llmpq.dist.launch.worker import import_tasks
print(*dict(import_tasks()), "llmpq.dist.launch.rank_tasks" in sys.modules)
print(gc.isenabled(), gc.get_freeze_count() > 100_000)
print(*[name for name, module in sys.modules.items() if name.startswith({UNUSED}) and module])
import torch, transformers
print(torch.distributed.is_available())
print("LlamaForCausalLM" in transformers._class_to_module)
"""


MASTER = f"""
import sys
from pathlib import Path
from llmpq.dist.launch.worker import import_tasks
dict(import_tasks())
import torch
from llmpq.quant.loading.master import load_master
load_master(Path(sys.argv[1]), dtype=torch.float32, device=torch.device("cpu"))
print(*[name for name, module in sys.modules.items() if name.startswith({UNUSED}) and module])
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA devices use some of them")
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
def test_a_master_with_scaled_embeddings_loads_no_compiler(tiny_model, family):
    loaded = subprocess.run(
        [sys.executable, "-c", MASTER, str(tiny_model(family))],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert loaded.stdout.split() == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA devices use some of them")
def test_a_worker_of_a_cpu_loads_no_compiler_no_sharded_tensors_and_no_list_of_models():
    loaded = subprocess.run(
        [sys.executable, "-c", WORKER], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.splitlines() == [
        "interpreter torch transformers True",
        "True True",
        "",
        "True",
        "False",
    ]


def test_a_process_that_starts_ranks_loads_neither_torch_nor_numpy():
    code = (
        "import sys; import llmpq.cli.commands.dist, llmpq.dist.launch.worker; print(*sys.modules)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"torch", "transformers", "numpy", "tqdm", "asyncio"} & set(loaded.stdout.split())
