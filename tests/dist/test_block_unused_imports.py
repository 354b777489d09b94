"""A worker does not load what it never uses."""

import subprocess
import sys

import pytest
import torch

UNUSED = ("scipy.", "accelerate", "sympy", "torch._dynamo", "torch.distributed.tensor", "triton.")
WORKER = f"""
import gc, sys
from pathlib import Path
from llmpq.dist.launch.worker import import_tasks

def unused():
    return [name for name, found in sys.modules.items() if name.startswith({UNUSED}) and found]

print(*dict(import_tasks()), "llmpq.dist.launch.rank_tasks" in sys.modules)
print(gc.isenabled(), gc.get_freeze_count() > 100_000)
print(*unused())
from llmpq.quant.loading.master import load_master
import torch
for path in map(Path, sys.argv[1:]):
    load_master(path, dtype=torch.float32, device=torch.device("cpu"))
    print(*unused())
import transformers
print(torch.distributed.is_available())
print("LlamaForCausalLM" in transformers._class_to_module)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA devices use some of them")
def test_a_worker_of_a_cpu_loads_no_compiler_no_sharded_tensors_and_no_list_of_models(tiny_model):
    """Nor does its master, whose embeddings some families scale."""
    models = [tiny_model(family) for family in ("llama", "gemma2", "gemma3")]
    loaded = subprocess.run(
        [sys.executable, "-c", WORKER, *map(str, models)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert loaded.stdout.splitlines() == [
        "interpreter torch transformers True",
        "True True",
        "",
        *[""] * len(models),
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
