"""A worker does not load what it never uses."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

UNUSED = ("scipy.", "accelerate", "sympy", "torch._dynamo", "torch.distributed.tensor", "triton.")
WORKER = f"""
import contextlib, gc, sys
from llmpq.dist.launch.worker import import_tasks
print(*dict(import_tasks()), "llmpq.dist.launch.rank_tasks" in sys.modules)
print(gc.isenabled(), gc.get_freeze_count() > 100_000)
print(*[name for name, module in sys.modules.items() if name.startswith({UNUSED}) and module])
import torch, transformers
print(torch.distributed.is_available())
print("LlamaForCausalLM" in transformers._class_to_module)
from llmpq.models.adapter import build_on_meta
print(type(torch.export).__name__, "torch._decomp" in sys.modules)
made = build_on_meta(lambda: torch.randperm(4), contextlib.nullcontext())
print(made.device, made.shape, "torch._decomp" in sys.modules)
"""


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
        "_DeferredModule False",
        "meta torch.Size([4]) True",
    ]


def test_a_process_that_starts_ranks_loads_neither_torch_nor_numpy():
    code = (
        "import sys; import llmpq.cli.commands.dist, llmpq.dist.launch.worker; print(*sys.modules)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"torch", "transformers", "numpy", "tqdm", "asyncio"} & set(loaded.stdout.split())


FAMILIES = """
import sys
sys.path.insert(0, "tests")
from llmpq.dist.launch.worker import import_tasks
import_tasks()
from helpers.tiny_configs import tiny_config
from llmpq.models import Master
from llmpq.models.config import prepare_config
from llmpq.models.families import TESTED
for name in sorted(TESTED):
    config, skeleton = prepare_config(tiny_config(name))
    [skeleton.build_layer(config, index) for index in range(config.num_hidden_layers)]
    Master(config)
print("torch._decomp" in sys.modules)
"""


@pytest.mark.slow  # 20 s: imports the model code of every family
def test_no_tested_family_needs_what_a_worker_defers():
    root = Path(__file__).resolve().parents[2]
    loaded = subprocess.run(
        [sys.executable, "-c", FAMILIES], capture_output=True, text=True, check=True, cwd=root
    )
    assert loaded.stdout.splitlines() == ["False"]
