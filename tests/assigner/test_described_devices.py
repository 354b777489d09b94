"""Plans on devices that a file describes: the same checks as for devices of the catalogue."""

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.certificate import certify
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.assigner import PlanRequest, make_plan
from llmpq.assigner.request import omega_of
from llmpq.costmodel import build_costs
from llmpq.errors import InfeasibleError
from llmpq.spec import catalog
from llmpq.spec.cluster import cluster_of_types, load_cluster
from llmpq.spec.devices.figures import FIGURES, DeviceEntry
from llmpq.spec.precision import BITS, Phase
from llmpq.spec.workload import Workload

CLUSTERS = Path(__file__).parents[2] / "inputs" / "clusters"
OWN = ("five-macs", "two-gaming-pcs", "mixed-rack")
MODELS = {
    "five-macs": "meta-llama/Llama-3.1-70B",
    "two-gaming-pcs": "Qwen/Qwen3-32B",
    "mixed-rack": "facebook/opt-66b",
}


def request(cluster, model, **options) -> PlanRequest:
    work = Workload(batch=4, prompt_tokens=256, new_tokens=64)
    values = {"dtype": "float16", "kv_bits": 16, "workload": work} | options
    return PlanRequest(model=catalog.model(model), cluster=cluster, **values)


def costs_of(wanted):
    return build_costs(
        wanted.model, wanted.cluster, dtype=wanted.dtype, kv_bits=wanted.kv_bits,
        latency="roofline",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "method"),
    [*((name, "llmpq") for name in OWN), ("five-macs", "uniform"), ("mixed-rack", "pipeedge")],
)
def test_a_plan_on_own_devices_is_certified(name, method):
    wanted = request(load_cluster(CLUSTERS / f"{name}.json"), MODELS[name], latency="roofline")
    try:
        plan = make_plan(wanted, method)
    except InfeasibleError:
        assert method in ("pipeedge", "uniform")  # they choose no bits by device
        return
    omega = omega_of(wanted)
    certify(plan, costs_of(wanted), lambda layer, b: float(omega[layer, BITS.index(b)]))
    if method == "llmpq":
        assert plan.search.status == "optimal"
        assert plan.search.gap <= 1e-3


def described(type_name: str) -> DeviceEntry:
    """The catalogue's type, written by hand with all of its figures."""
    spec = catalog.device(type_name)
    return DeviceEntry(
        type=f"my {type_name}", kind=spec.kind, **{name: getattr(spec, name) for name in FIGURES}
    )


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(catalog.device_types()), phase=st.sampled_from(Phase),
    bits=st.sampled_from(BITS), batch=st.integers(1, 64), tokens=st.integers(1, 2048),
    dtype=st.sampled_from(["float16", "float32"]), threads=st.sampled_from([None, 1, 7, 400]),
)  # fmt: skip
def test_a_described_device_costs_what_the_catalogues_does(
    name, phase, bits, batch, tokens, dtype, threads
):
    found = []
    for type_name, types in ((name, None), (f"my {name}", (described(name),))):
        cluster = cluster_of_types({type_name: 1})
        group = replace(cluster.nodes[0].devices[0], threads=threads)
        cluster = replace(
            cluster, nodes=(replace(cluster.nodes[0], devices=(group,)),), device_types=types
        )
        costs = costs_of(request(cluster, "facebook/opt-13b", dtype=dtype))
        device = cluster.devices[0]
        found.append(
            (
                costs.layer_s(device, phase, bits, batch, tokens, 0),
                costs.master_s(device, phase, batch, tokens),
                costs.capacity_bytes(device),
                costs.runtime_bytes(device),
            )
        )
    assert found[0] == found[1]


def test_a_plan_on_described_devices_is_that_on_the_catalogues():
    names = ("T4-16G", "V100-32G")
    plain = cluster_of_types({"T4-16G": 2, "V100-32G": 1})
    own = replace(
        cluster_of_types({"my T4-16G": 2, "my V100-32G": 1}),
        device_types=tuple(described(name) for name in names),
    )
    plans = [
        make_plan(request(cluster, "facebook/opt-13b", latency="roofline"))
        for cluster in (plain, own)
    ]
    assert plans[0].stages == plans[1].stages
    assert plans[0].estimate == plans[1].estimate


@pytest.mark.parametrize("name", ["EPYC-9654", "Xeon-8480"])
def test_a_whole_processor_is_fastest_with_all_its_cores(name):
    spec = catalog.device(name)
    seconds = []
    for threads in (1, 8, spec.cores, 2 * spec.cores, None):
        cluster = cluster_of_types({name: 1})
        group = replace(cluster.nodes[0].devices[0], threads=threads)
        cluster = replace(cluster, nodes=(replace(cluster.nodes[0], devices=(group,)),))
        costs = costs_of(request(cluster, "facebook/opt-1.3b", dtype="bfloat16"))
        seconds.append(costs.layer_s(cluster.devices[0], Phase.DECODE, 16, 1, 64, 0))
    assert seconds[0] > seconds[1] > seconds[2] == seconds[3] == seconds[4]
    assert seconds[2] >= catalog.model("facebook/opt-1.3b").layer_types[0].parameters * 2 / (
        spec.memory_bytes_per_s
    )
