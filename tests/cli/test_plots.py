"""Pictures of plans show what a person wants to compare."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.ranks import make_plan
from matplotlib.figure import Figure

from llmpq.cli.plots import _draw_memory
from llmpq.spec.plan import MemoryParts
from llmpq.units import MIB


@pytest.mark.parametrize(("runtime", "begin"), [(286, 280), (100, 0)])
def test_the_memory_axis_leaves_out_a_runtime_that_hides_everything_else(runtime, begin):
    plan = make_plan((0, 1, 3))
    parts = MemoryParts(weights=3 * MIB, kv=4 * MIB, temporary=MIB, master=0, runtime=runtime * MIB)
    stages = [replace(one, memory=parts, capacity_bytes=300 * MIB) for one in plan.estimate.stages]
    plan = replace(plan, estimate=replace(plan.estimate, stages=tuple(stages)))
    axis = Figure().subplots()
    _draw_memory(axis, plan)
    low, high = axis.get_xlim()
    assert low == begin
    assert high > 300
    assert ("begins at" in axis.get_xlabel()) == bool(begin)
