"""The plan of a model with experts for a host with GPUs: experts in memory where that is better."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from itertools import product

import pytest

from llmpq.assigner.planner import make_plan
from llmpq.assigner.request import PlanRequest
from llmpq.cli.front import host_plan as module
from llmpq.cli.front.host_plan import host_plan, plan_decisions, plan_text
from llmpq.cli.front.plan_options import add_host_plan_options
from llmpq.costmodel.host_clusters import with_experts_on_hosts
from llmpq.errors import InfeasibleError
from llmpq.profiler.device import host_cluster
from llmpq.spec import catalog
from llmpq.spec.catalog import with_device_types
from llmpq.spec.cluster import Cluster, LinkSpec, Node
from llmpq.spec.devices.figures import DeviceEntry
from llmpq.spec.workload import Workload
from llmpq.units import GIB, format_bytes

CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 2048,
    "moe_intermediate_size": 512, "num_experts": 64, "num_experts_per_tok": 4, "vocab_size": 8192,
    "max_position_embeddings": 16384, "tie_word_embeddings": False, "torch_dtype": "float16",
    "architectures": ["Qwen3MoeForCausalLM"],
}  # fmt: skip
"""0.8 G parameters, most of them in experts, at 8 bits 0.85 GB."""
SLOW = {
    "memory_bytes_per_s": 4e9,
    "flops": (("float32", 4e10), ("float16", 2e10)),
    "layer_overhead_s": 1e-3,
}
"""Figures of a CPU that is better at a few scattered experts than at whole layers."""


@pytest.fixture
def folder(tmp_path):
    """The model; its weights are not read."""
    path = tmp_path / "sparse"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def entry_of(gather=8e9):
    """Figures as measured: scattered experts are read at that rate."""
    return DeviceEntry(
        type="cpu", kind="cpu", memory_bytes=16 * GIB, cores=8, gather_bytes_per_s=gather, **SLOW
    )


class ThisHost:
    """A host with GPUs: free memory of each in GiB, that of its CPU, its rate of experts."""

    gpus = (1.6,)
    gib = 6.0
    entry = entry_of()

    def __call__(self):
        found = host_cluster([("RTX 3060 12GB", int((gib + 0.5) * GIB)) for gib in self.gpus])
        (node,) = found.nodes
        *gpus, cpu = node.devices
        cpu = replace(cpu, threads=8, memory_bytes=int(self.gib * GIB), instruction_set="avx2")
        return replace(found, nodes=(replace(node, devices=(*gpus, cpu)),))

    def figures(self, cluster):
        return with_device_types(cluster, [self.entry])


@pytest.fixture
def here(monkeypatch, tmp_path):
    own = ThisHost()
    monkeypatch.setattr(module, "host_cluster", own)
    for name in ("with_kept_figures", "with_measured_figures"):
        monkeypatch.setattr(module, name, own.figures)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return own


def planned(model, *words, others=None):
    parser = argparse.ArgumentParser()
    add_host_plan_options(parser, 1)
    options = parser.parse_args(words)
    options.command = "llmpq test"
    return host_plan(str(model), options, others)


def num_apart(plan):
    return sum(stage.num_apart for stage in plan.stages)


def at_context(model, cluster, batch, context):
    """The fastest plan at 8 bits or more, ``None`` where there is none."""
    answer = min(512, context // 4)
    work = Workload(
        batch=batch, prompt_tokens=min(256, context - answer), new_tokens=answer,
        context_tokens=context,
    )  # fmt: skip
    request = PlanRequest(
        model=model, model_source=None, cluster=cluster, workload=work, dtype="float16", kv_bits=16,
        bits=(16, 8), theta_s=0.0, quality_budget=(15 / 255) ** 2 * (1 + 1e-9), no_streaming=True,
    )  # fmt: skip
    try:
        return make_plan(request)
    except InfeasibleError:
        return None


def by_hand(model, clusters, batch):
    """The documented rule over the plans of all clusters at each context."""
    best = {}
    for context in (16384, 8192):
        plans = [at_context(model, cluster, batch, context) for cluster in clusters]
        best[context] = min(
            (plan for plan in plans if plan), key=lambda plan: plan.estimate.latency_s, default=None
        )
    longest, short = best.values()
    if longest and longest.answer_tokens_per_s >= 0.9 * short.answer_tokens_per_s:
        return longest
    return short


@pytest.mark.parametrize(
    ("gpus", "gather", "batch"),
    [*product([(1.6,), (1.5, 1.6)], [8e9, 1e8], [1, 3]), ((1.7,), 2e9, 2), ((6.0,), 8e9, 1)],
)
def test_the_plan_is_the_better_one_of_two_clusters(here, folder, gpus, gather, batch):
    here.gpus, here.entry = gpus, entry_of(gather)
    found = planned(folder, "--max_num_seqs", str(batch), "--bits", "16", "8").plan
    model = catalog.resolve_model(folder)[0]
    cluster = here.figures(here())
    expected = by_hand(model, (cluster, with_experts_on_hosts(cluster, batch)), batch)
    assert found.workload == expected.workload
    assert found.estimate.latency_s == pytest.approx(expected.estimate.latency_s, rel=1e-9)
    assert num_apart(found) == num_apart(expected)
    assert (num_apart(found) > 0) == (gather > 5e9 and gpus != (6.0,))


def test_fast_and_slow_hosts_are_used_differently(here, folder):
    fast = planned(folder).plan
    here.entry = entry_of(1e8)
    slow = planned(folder).plan
    here.gpus = (6.0,)
    alone = planned(folder, "--replan").plan
    assert num_apart(fast) > 0
    assert [fast.device_of(stage).type for stage in fast.stages] == ["RTX3060-12G"]
    assert num_apart(slow) == num_apart(alone) == 0
    assert "cpu" in [slow.device_of(stage).type for stage in slow.stages]
    assert [alone.device_of(stage).type for stage in alone.stages] == ["RTX3060-12G"]


def test_a_plan_with_experts_in_memory_is_kept_while_they_fit(here, folder):
    first = planned(folder)
    needed = first.plan.estimate.stages[0].memory.host
    process = catalog.device("cpu", first.plan.cluster).runtime_bytes
    assert (first.is_new, needed > 0) == (True, True)
    here.gib = (needed + process + 1) / GIB
    again = planned(folder)
    assert (again.is_new, again.file, again.plan) == (False, first.file, first.plan)
    here.gib = (needed + process - 1) / GIB
    other = planned(folder)
    assert other.is_new
    assert other.plan.estimate.stages[0].memory.host != needed


def test_a_kept_plan_needs_the_memory_of_its_gpu_too(here, folder):
    first = planned(folder)
    needed = first.plan.estimate.stages[0].memory.total
    here.gpus = ((needed - 1) / GIB,)
    assert planned(folder).is_new


def test_text_and_record_say_what_is_in_host_memory(here, folder):
    found = planned(folder)
    (stage,), (estimate,) = found.plan.stages, found.plan.estimate.stages
    host = estimate.memory.host
    text = plan_text(found)
    count = f"{stage.num_apart} layers"
    assert f"experts of {count} in host memory ({format_bytes(host)})" in text
    assert "forecast with measured devices" in text
    (row,) = plan_decisions(found)["devices"]
    assert row["layers_with_experts_on_host"] == stage.num_apart > 0
    assert row["host_memory_bytes"] == host > 0
    assert row["memory_bytes"] == estimate.memory.total


class Others:
    """Another host with a GPU and the same processor, and a link to it."""

    def __init__(self, there):
        self.there = there

    def own(self, cluster):
        return cluster

    def joined(self, own, **_):
        nodes = (*own.nodes, Node(name="there", devices=self.there.nodes[0].devices))
        link = LinkSpec(between=("here", "there"), bytes_per_s=1e9, latency_s=1e-4)
        return Cluster(name="two", nodes=nodes, links=(link,), device_types=own.device_types)


def test_experts_are_in_the_memory_of_several_hosts(here, folder):
    here.gpus, here.gib = (1.5,), 0.75
    with pytest.raises(InfeasibleError):
        planned(folder, "--bits", "8", "--no_streaming")
    found = planned(folder, "--bits", "8", "--no_streaming", others=Others(here.figures(here())))
    plan = found.plan
    assert plan.nodes == ("here", "there")
    assert all(stage.num_apart for stage in plan.stages)
    assert not planned(
        folder, "--bits", "8", "--no_streaming", others=Others(here.figures(here()))
    ).is_new
    rows = re.findall(r"experts of \d+ layers? in host memory", plan_text(found))
    assert len(rows) == 2
