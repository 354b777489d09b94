"""Which of a host's accelerators a rank takes, by the kind of its device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.draft_plans import with_draft
from helpers.ranks import make_plan

from llmpq.dist.launch.rank import torch_device
from llmpq.errors import SpecError
from llmpq.spec.cluster import Cluster, DeviceGroup, Node

TYPES = {"cuda": "L4", "xpu": "Arc-B580", "mps": "M2"}


def plan_on(*types):
    groups = tuple(DeviceGroup(type=name, count=1) for name in types)
    cluster = Cluster(name="c", nodes=(Node(name="n", devices=groups),))
    return make_plan(tuple(range(len(types) + 1)), cluster=cluster)


@pytest.mark.parametrize("kind", TYPES)
def test_an_accelerator_that_is_not_here_is_refused(kind, monkeypatch):
    monkeypatch.setattr("llmpq.dist.launch.rank.accelerators", lambda _: 0)
    message = f"found 0 {kind.upper()} devices on this host, expected at least 1"
    with pytest.raises(SpecError, match=message):
        torch_device(plan_on(TYPES[kind]), 0)


def test_ranks_count_accelerators_of_their_own_kind(monkeypatch):
    chosen = []
    monkeypatch.setattr("llmpq.dist.launch.rank.accelerators", lambda _: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: chosen.append(("cuda", index)))
    monkeypatch.setattr(torch.xpu, "set_device", lambda index: chosen.append(("xpu", index)))
    plan = plan_on("L4", "Arc-B580", "cpu", "RTX3090", "Arc-A770")
    devices = [torch_device(plan, rank) for rank in range(5)]
    assert [str(one) for one in devices] == ["cuda:0", "xpu:0", "cpu", "cuda:1", "xpu:1"]
    assert chosen == [("cuda", 0), ("xpu", 0), ("cuda", 1), ("xpu", 1)]
    drafting = replace(make_plan((0, 1)), cluster=plan.cluster, dropped_devices=(1, 2, 3, 4))
    assert str(torch_device(with_draft(drafting, "m", device=3), 1)) == "cuda:1"
    assert chosen[-1] == ("cuda", 1)
