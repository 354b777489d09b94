"""Messages about infeasible requests: every fix that they name is tried."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from helpers.builders import cluster_of, model_spec, plan_request

from llmpq.assigner import make_plan
from llmpq.assigner.constraints.resolve import Overrides
from llmpq.assigner.explain.infeasible import dropped_reasons, held_layers
from llmpq.assigner.milp import ilp
from llmpq.assigner.milp.solvers import SolverResult
from llmpq.costmodel import build_costs
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, DeviceGroup, LinkSpec, Node, cluster_of_types
from llmpq.spec.workload import Workload
from llmpq.units import GIB


def too_small(**overrides):
    return plan_request(
        **(
            {
                "cluster": cluster_of(("V100-32G", 1, 60), ("T4-16G", 1, 40)),
                "workload": Workload(batch=16, prompt_tokens=256, new_tokens=32),
            }
            | overrides
        )
    )


def reason_of(request) -> str:
    with pytest.raises(InfeasibleError) as caught:
        make_plan(request)
    return str(caught.value)


def test_memory_message_names_the_layers_that_fit_and_their_bytes() -> None:
    request = too_small()
    text = reason_of(request)
    assert f"{held_layers(request)} of 6 layers fit at 3 bits" in text
    assert "KV cache (16 sequences of 288 tokens)" in text


def test_the_batch_named_fits_and_one_more_does_not() -> None:
    request = too_small()
    batch = int(re.search(r"batch <= (\d+)", reason_of(request)).group(1))
    make_plan(replace(request, workload=replace(request.workload, batch=batch)))
    reason_of(replace(request, workload=replace(request.workload, batch=batch + 1)))


def test_the_devices_named_fit_and_one_fewer_do_not() -> None:
    text = reason_of(too_small())
    more = int(re.search(r"\+(\d+) V100-32G", text).group(1))
    make_plan(too_small(cluster=cluster_of(("V100-32G", 1 + more, 60), ("T4-16G", 1, 40))))
    reason_of(too_small(cluster=cluster_of(("V100-32G", more, 60), ("T4-16G", 1, 40))))


def test_a_cpu_is_offered_memory_and_not_another_cpu() -> None:
    group = DeviceGroup(type="cpu", count=1, threads=1, memory_bytes=400 * 2**20)
    cluster = Cluster(name="c", nodes=(Node(name="n", devices=(group,)),))
    text = reason_of(too_small(cluster=cluster))
    assert re.search(r"\+[\d.]+ [GM]iB memory for cpu", text)
    assert "+1 cpu" not in text


def test_the_short_reason_names_the_same_fixes_but_bits() -> None:
    with pytest.raises(InfeasibleError) as caught:
        make_plan(too_small(bits=(16, 8)))
    assert len(caught.value.short) < len(str(caught.value)) / 2
    assert "allow" not in caught.value.short
    assert caught.value.short.split("; ")[0] in str(caught.value)
    assert InfeasibleError("why").short == "why"


def test_narrower_bits_are_offered_when_they_are_not_allowed() -> None:
    cluster = cluster_of(("V100-32G", 1, 150))
    text = reason_of(plan_request(cluster=cluster, bits=(16,)))
    width = int(re.search(r"allow (\d+) bits", text).group(1))
    make_plan(plan_request(cluster=cluster, bits=(16, width)))


def test_several_kinds_are_counted_in_their_order() -> None:
    request = too_small(model=model_spec(layers=7, kinds=2))
    assert 0 <= held_layers(request) < 7
    assert f"{held_layers(request)} of 7 layers" in reason_of(request)


def test_a_master_that_fits_nowhere_is_named() -> None:
    text = reason_of(plan_request(cluster=cluster_of(("V100-32G", 2, 3))))
    assert "no device holds temporary memory" in text
    assert "embeddings and head" in text


def test_every_part_is_named_with_its_size_the_largest_first() -> None:
    request = plan_request(
        model=catalog.model("meta-llama/Llama-3.1-8B"),
        cluster=cluster_of_types({"RTX3060-12G": 1}),
        workload=Workload(batch=1, prompt_tokens=131_000, new_tokens=72),
        bits=(4,),
        dtype="bfloat16",
    )
    text = reason_of(request)
    listed = text.partition("needed: ")[2].partition("; 1 device may use 11.5 GiB")[0]
    parts = re.findall(r"(?:^|, )([a-zA-Z].*?) ([\d.]+) (GiB|MiB)", listed)
    names = [name for name, _, _ in parts]
    assert names[0] == "KV cache (1 sequences of 131072 tokens)"
    sizes = [float(size) / (1024 if unit == "MiB" else 1) for _, size, unit in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 16.0
    assert {
        "weights of 32 layers at 4 bits",
        "temporary memory (prompts in chunks of 1024 tokens)",
        "embeddings and head",
        "process",
    } <= set(names)
    assert "(another 512 MiB is reserved)" in text
    # Both named fixes hold, and neither a token more.
    prompt = int(re.search(r"prompts <= (\d+) tokens", text).group(1))
    make_plan(replace(request, workload=replace(request.workload, prompt_tokens=prompt)))
    reason_of(replace(request, workload=replace(request.workload, prompt_tokens=prompt + 1)))
    more = int(re.search(r"\+(\d+) RTX3060-12G", text).group(1))
    make_plan(replace(request, cluster=cluster_of_types({"RTX3060-12G": 1 + more})))


def test_fewer_bits_of_keys_and_values_are_offered() -> None:
    request = plan_request(
        model=catalog.model("meta-llama/Llama-3.1-8B"),
        cluster=cluster_of_types({"RTX3090": 1}),
        workload=Workload(batch=8, prompt_tokens=24_000, new_tokens=384),
        dtype="bfloat16",
        bits=(4,),
    )
    assert "--kv_bits 8" in reason_of(request)
    make_plan(replace(request, kv_bits=8))


def test_a_cpu_is_offered_four_bits_where_eight_are_too_many() -> None:
    group = DeviceGroup(type="cpu", count=1, threads=8, memory_bytes=9 * GIB)
    node = Node(name="a", devices=(group,))
    request = plan_request(
        model=catalog.model("meta-llama/Llama-3.1-8B"),
        cluster=Cluster(name="host", nodes=(node,)),
        workload=Workload(batch=1, prompt_tokens=50_000, new_tokens=384),
        dtype="bfloat16",
        bits=(4,),
    )
    assert "--kv_bits 4" in reason_of(request)
    make_plan(replace(request, kv_bits=4))


@pytest.mark.parametrize(
    ("model", "device", "message"),
    [
        ("meta-llama/Llama-3.1-8B", "RTX3090", "device .* of kind 'cuda', which has no kernel"),
        ("deepseek-ai/DeepSeek-V2-Lite", "cpu", "latent attention"),
    ],
)
def test_four_bits_are_refused_where_nothing_reads_them(model, device, message) -> None:
    request = plan_request(
        model=catalog.model(model),
        cluster=cluster_of_types({device: 1}),
        workload=Workload(batch=1, prompt_tokens=100, new_tokens=10),
        dtype="bfloat16",
        bits=(4,),
        kv_bits=4,
    )
    with pytest.raises(SpecError, match=f"kv_bits: found 4 with .*{message}.*expected 8"):
        make_plan(request)


def test_an_unreachable_budget_names_the_one_within_reach() -> None:
    cluster = cluster_of(("V100-32G", 1, 75), ("T4-16G", 1, 45))
    request = plan_request(quality_budget=0.01, cluster=cluster)
    text = reason_of(request)
    assert "memory forces a degradation" in text
    reachable = float(re.search(r"raise the budget to ([\d.]+)", text).group(1))
    plan = make_plan(replace(request, quality_budget=reachable))
    assert plan.estimate.quality <= reachable
    reason_of(replace(request, quality_budget=0.98 * reachable))


def test_the_time_limit_message_differs_from_the_memory_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing = SolverResult(status="unknown", values={}, objective=math.inf, bound=-math.inf)
    monkeypatch.setattr(ilp, "solve", lambda *_, **__: nothing)
    # No split in proportion stands in for the search: it would not know of the order.
    decided = Overrides(order=("node1", "node0"))
    text = reason_of(plan_request(solver="highs", time_limit_s=0.0, overrides=decided))
    assert "time limit" in text
    assert "does not fit" not in text


def test_uniform_says_that_other_splits_may_fit() -> None:
    cluster = cluster_of(("V100-32G", 1, 400), ("T4-16G", 1, 12))
    with pytest.raises(InfeasibleError, match="other splits may fit"):
        make_plan(plan_request(cluster=cluster), "uniform")
    make_plan(plan_request(cluster=cluster))


def reasons_for(request) -> list[str]:
    costs = build_costs(request.model, request.cluster, dtype="float16", kv_bits=16)
    return list(dropped_reasons(make_plan(request), costs).values())


def test_dropped_devices_come_with_a_figure() -> None:
    link = LinkSpec(between=("node0", "node1"), bytes_per_s=1e6, latency_s=0.05)
    slow = cluster_of(("A100-40G", 1, 2000), ("P100-12G", 1, 2000), links=(link,))
    assert reasons_for(plan_request(cluster=slow))[0].startswith("slower: ")
    small = cluster_of(("A100-40G", 1, 2000), ("P100-12G", 1, 1))
    assert reasons_for(plan_request(cluster=small))[0].startswith("no room: ")
    idle = cluster_of(("P100-12G", 1, 2000), ("P100-12G", 1, 2000), links=(link,))
    assert reasons_for(plan_request(cluster=idle))[0].startswith("not needed: ")
