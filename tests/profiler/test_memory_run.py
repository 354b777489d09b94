"""A plan's stages, run at full size: what they hold is what was predicted, byte for byte."""

import pytest

from llmpq.cli.profile_memory import even_plan
from llmpq.dist.report import memory_parts
from llmpq.profiler.memory import measure_memory

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("family", "kv_bits"), [("llama", 16), ("bloom", 8), ("mixtral", 16)])
def test_weights_and_slots_are_allocated_as_predicted(tiny_model, family, kv_bits):
    folder = tiny_model(family)
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
