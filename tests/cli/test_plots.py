"""Pictures of plans show what a person wants to compare."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.ranks import make_plan
from matplotlib.figure import Figure

from llmpq.cli.plots import _draw_memory, draw_front, draw_plan
from llmpq.spec.plan import QUALITY_UNIT, MemoryParts
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


@pytest.mark.parametrize(
    "name", ["demo", "an-organisation/A-Model-With-A-Long-Name-Of-70B-Instruct"]
)
def test_titles_lie_inside_of_pictures(monkeypatch, tmp_path, name):
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    plan = make_plan((0, 1, 3), batch=32)
    plan = replace(
        plan,
        model=replace(plan.model, name=name),
        cluster=replace(plan.cluster, name="-and-".join(["rtx-pro-6000x8"] * 6)),
        provenance=replace(plan.provenance, inputs=((QUALITY_UNIT, "0.018 nats"),)),
    )
    draw_plan(plan, tmp_path / "plan.png")
    draw_front([plan], tmp_path / "front.png")
    for figure in figures:
        figure.canvas.draw()
        title = next(text for text in figure.texts if name in text.get_text().replace("\n", ""))
        box = title.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
        assert "nats" in title.get_text() or figure is figures[1]
