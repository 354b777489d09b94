"""Number formats by device: what is chosen, what it costs, what is refused."""

from dataclasses import replace

import pytest
from helpers.certificate import certify

from llmpq.assigner import PlanRequest, make_plan
from llmpq.assigner.request import omega_of
from llmpq.assigner.verify import verify_plan
from llmpq.cli.render import format_text, plan_record, plan_table
from llmpq.costmodel import build_costs
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec import catalog
from llmpq.spec.cluster import cluster_of_types
from llmpq.spec.devices.figures import (
    LEAST_CAPABILITY,
    DeviceEntry,
    compute_format,
    offered_kernels,
)
from llmpq.spec.plan import read_plan, write_plan
from llmpq.spec.precision import BITS, DTYPE_BYTES
from llmpq.spec.workload import Workload

MODEL = catalog.model("facebook/opt-1.3b")


def request(cluster, dtype="bfloat16", **options):
    return PlanRequest(
        model=MODEL, cluster=cluster, dtype=dtype, kv_bits=8 * DTYPE_BYTES[dtype],
        workload=Workload(batch=4, prompt_tokens=64, new_tokens=16), latency="roofline", **options,
    )  # fmt: skip


def with_old(types):
    """A cluster of types, of which ``old`` computes float32 alone."""
    old = DeviceEntry(type="old", like="P40", flops=(("float32", 1.2e13),))
    return replace(cluster_of_types(types), device_types=(old,))


def costs_of(wanted):
    return build_costs(
        wanted.model, wanted.cluster, dtype=wanted.dtype, kv_bits=wanted.kv_bits,
        latency="roofline",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype", "form"),
    [
        ("T4-16G", "bfloat16", "float16"), ("V100-32G", "bfloat16", "float16"),
        ("P100-12G", "bfloat16", "float16"), ("P40", "bfloat16", "float16"),
        ("GTX1080Ti", "float16", "float16"), ("A100-40G", "bfloat16", "bfloat16"),
        ("T4-16G", "float16", "float16"), ("T4-16G", "float32", "float32"),
        ("cpu", "bfloat16", "bfloat16"), ("M1", "bfloat16", "bfloat16"),
    ],
)  # fmt: skip
def test_a_stage_has_a_format_of_its_device(name, dtype, form):
    assert compute_format(catalog.device(name), dtype) == form


@pytest.mark.parametrize("name", catalog.device_types())
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_device_computes_what_it_is_given(name, dtype):
    spec = catalog.device(name)
    assert compute_format(spec, dtype) in spec.formats


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_a_device_of_one_format_computes_in_it(dtype):
    assert compute_format(catalog.device("old", with_old({"old": 1})), dtype) == "float32"


def test_a_slow_half_precision_is_not_chosen():
    pascal = replace(catalog.device("P40"), flops=(("float16", 1.8e11), ("float32", 1.2e13)))
    assert compute_format(pascal, "bfloat16") == "float32"
    assert compute_format(pascal, "float16") == "float16"


def test_what_a_device_cannot_compute_is_refused_with_the_reason():
    t4 = catalog.device("T4-16G")
    with pytest.raises(SpecError, match="T4-16G: field 'dtype': found 'bfloat16', expected one of"):
        compute_format(t4, "float16", "bfloat16")
    half = replace(t4, flops=(("float16", 1e13),))
    with pytest.raises(SpecError, match="a float32 run found float16 alone, expected float32"):
        compute_format(half, "float32")


def test_a_bfloat16_plan_names_the_format_of_every_stage(tmp_path):
    wanted = request(with_old({"T4-16G": 1, "A100-40G": 1, "old": 1}))
    wanted = replace(wanted, overrides=replace(wanted.overrides, use=("T4-16G", "A100-40G", "old")))
    plan = make_plan(wanted, command="test")
    found = {plan.device_of(stage).type: plan.dtype_of(stage) for stage in plan.stages}
    assert found == {"T4-16G": "float16", "A100-40G": "bfloat16", "old": "float32"}
    costs, omega = costs_of(wanted), omega_of(wanted)
    certify(plan, costs, lambda layer, b: float(omega[layer, BITS.index(b)]))
    path = tmp_path / "plan.json"
    write_plan(path, plan)
    assert read_plan(path) == plan
    assert verify_plan(plan, "plan.json", profile_dir=None).excess_bytes == 0
    table, text = plan_table(plan, {}), "\n".join(format_text(plan))
    assert "float16" in table
    assert "node0/T4-16G#0 computes float16, float32, not bfloat16: its stage runs in" in text
    records = plan_record(plan, None)["stages"]
    assert {record["dtype"] for record in records} == set(found.values())
    wrong = replace(plan, stages=tuple(replace(stage, dtype=None) for stage in plan.stages))
    with pytest.raises(SpecError, match=r"stages\[\d\]\.dtype': found 'bfloat16', expected 'float"):
        verify_plan(wrong, "plan.json", profile_dir=None)


def test_a_wider_format_takes_its_memory_and_its_link():
    costs = costs_of(request(with_old({"T4-16G": 1, "old": 1})))
    t4, old = costs.cluster.devices
    assert costs.layer_weight_bytes(old, 0, 16) == 2 * costs.layer_weight_bytes(t4, 0, 16)
    assert costs.layer_kv_bytes(0, 4, 80, old) == 2 * costs.layer_kv_bytes(0, 4, 80, t4)
    assert costs.master_bytes(old) == 2 * costs.master_bytes(t4)
    assert (costs.kv_bits_of(t4), costs.kv_bits_of(old)) == (16, 32)
    quantized = build_costs(MODEL, costs.cluster, dtype="bfloat16", kv_bits=8)
    assert {quantized.kv_bits_of(one) for one in (t4, old)} == {8}


def test_a_run_all_of_whose_devices_have_its_format_is_as_before():
    wanted = request(cluster_of_types({"A100-40G": 1, "L4": 1}))
    plan = make_plan(wanted)
    assert all(stage.dtype is None for stage in plan.stages)
    assert format_text(plan) == ()


def test_the_cluster_may_choose_the_format_of_a_group():
    cluster = cluster_of_types({"A100-40G": 1})
    (node,) = cluster.nodes
    group = replace(node.devices[0], dtype="float32")
    cluster = replace(cluster, nodes=(replace(node, devices=(group,)),))
    (stage,) = make_plan(request(cluster)).stages
    assert stage.dtype == "float32"


def own(**fields):
    return DeviceEntry(type="own", like="T4-16G", **fields)


@pytest.mark.parametrize("method", ["llmpq", "heuristic", "adabits"])
def test_a_layer_never_has_bits_its_device_does_not_multiply_by(method):
    cluster = replace(cluster_of_types({"own": 1, "L4": 1}), device_types=(own(bits=(16, 4)),))
    plan = make_plan(request(cluster, bits=(16, 8, 3), theta_s=0.0), method)
    for stage in plan.stages:
        if plan.device_of(stage).type == "own":
            assert set(stage.bits) <= {16}
    alone = replace(cluster_of_types({"own": 1}), device_types=(own(bits=(4,)),))
    with pytest.raises(InfeasibleError):
        make_plan(request(alone, bits=(8,)))


@pytest.mark.parametrize(
    ("name", "bits", "dtype", "kernels"),
    [
        ("A100-40G", 4, "bfloat16", ("cuda_int4", "triton_int", "reference")),
        ("A100-40G", 4, "float16", ("triton_int", "reference")),
        ("A100-40G", 8, "bfloat16", ("triton_int", "bnb_int8", "cuda_int8", "reference")),
        ("T4-16G", 8, "float16", ("bnb_int8", "cuda_int8", "reference")),
        ("T4-16G", 4, "float16", ("reference",)), ("V100-32G", 8, "float16", ("reference",)),
        ("MI300X", 4, "bfloat16", ("triton_int", "reference")),
        ("M1", 4, "float16", ("reference",)),
        ("A100-40G", 16, "bfloat16", ()),
    ],
)  # fmt: skip
def test_kernels_are_offered_by_compute_capability(name, bits, dtype, kernels):
    assert offered_kernels(catalog.device(name), bits, dtype) == kernels


def test_every_conditional_kernel_is_known():
    known = {name for bits in (8, 4, 3) for name in offered_kernels(
        catalog.device("H100"), bits, "bfloat16")}  # fmt: skip
    assert set(LEAST_CAPABILITY) == known - {"reference"}
