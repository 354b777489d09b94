"""The measured memory of a plan's stages is the predicted memory."""

import random

import pytest

from llmpq.assigner.planner import even_plan
from llmpq.dist.metrics.report import memory_parts
from llmpq.kernels.cpu.native import instruction_set
from llmpq.profiler.memory import measure_memory

WIDE = {"layers": 6, "hidden": 512, "intermediate": 1536, "heads": 8, "kv_heads": 4, "vocab": 4000}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kv_bits"), [("llama", 16), ("bloom", 8), ("mixtral", 16), ("llama", 4)]
)
def test_weights_and_slots_are_allocated_as_predicted(tiny_model, family, kv_bits):
    folder = tiny_model(family, shape=WIDE if kv_bits == 4 else {})
    plan = even_plan(
        folder, bits=(16, 4), stages=2, shape=(2, 12, 4), micro_batch=(1, 2), kv_bits=kv_bits,
        dtype="bfloat16",
    )  # fmt: skip
    stages = measure_memory(plan, folder)
    for stats in stages:
        parts = memory_parts(plan, stats)
        for name in ("weights", "kv"):
            assert parts[name]["measured"] == parts[name]["predicted"]
        assert 0 < parts["loading_peak"]["measured"] <= stats.memory_bytes


@pytest.mark.dist
def test_no_stage_takes_more_than_predicted(tiny_model):
    folder = tiny_model("llama", shape={**WIDE, "max_positions": 256})
    plan = even_plan(
        folder, bits=(4, 16), stages=2, shape=(4, 200, 4), micro_batch=(2, 4), dtype="bfloat16",
        instruction_set=instruction_set(),
    )  # fmt: skip
    for stats in measure_memory(plan, folder):
        predicted = plan.estimate.stages[stats.rank].memory.total
        assert -0.01 <= predicted / stats.memory_bytes - 1 <= 0.05


@pytest.mark.dist
def test_prompts_of_many_lengths_take_no_more_than_predicted(tiny_model):
    """Before rows were split into few sizes, every new number of rows left compiled code behind."""
    folder = tiny_model("llama", shape={**WIDE, "hidden": 256, "max_positions": 128})
    plan = even_plan(
        folder, bits=(16,), stages=1, shape=(8, 60, 4), micro_batch=(4, 8), dtype="bfloat16"
    )
    chance = random.Random(0)
    lengths = [chance.randint(4, 60) for _ in range(160)]
    (stats,) = measure_memory(plan, folder, lengths=lengths)
    predicted = plan.estimate.stages[0].memory.total
    assert -0.01 <= predicted / stats.memory_bytes - 1 <= 0.10
