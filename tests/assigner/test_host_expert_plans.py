"""Plans with experts in the memory of their hosts: checked, forecast, shown, refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.ranks import make_plan, with_weights_on_disk

from llmpq.assigner.forecast import costs_of_plan, evaluate_plan, forecast
from llmpq.assigner.request import default_omega
from llmpq.assigner.verify import verify_plan
from llmpq.cli.render import plan_table
from llmpq.errors import SpecError
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, DeviceGroup, DeviceHost, Node
from llmpq.spec.devices.figures import DeviceEntry
from llmpq.spec.fields import to_json
from llmpq.spec.plan import ModelRef, read_plan, write_plan
from llmpq.spec.precision import BITS, LayerExperts, StageExperts
from llmpq.units import GIB, format_bytes

MODEL = catalog.model("Qwen/Qwen3-30B-A3B")
LAYERS = MODEL.num_layers
XEON = DeviceEntry(type="xeon", like="cpu", gather_bytes_per_s=1e10)
HOST = DeviceHost(type="xeon", threads=8, memory_bytes=64 * GIB)


def plan_of(experts=None, *, host=HOST, bits=4):
    """A plan of all layers on one GPU beside a host."""
    group = DeviceGroup(type="RTX3060-12G", count=1, host=host)
    cluster = Cluster(name="box", nodes=(Node(name="box", devices=(group,)),), device_types=(XEON,))
    plan = make_plan((0, LAYERS), bits=[bits] * LAYERS, cluster=cluster, batch=4)
    plan = replace(
        plan,
        dtype="float16",
        kv_bits=16,
        model=ModelRef(name=MODEL.name, num_layers=LAYERS),
        stages=(replace(plan.stages[0], experts=experts),),
    )
    estimate, _ = evaluate_plan(plan, costs_of_plan(plan, MODEL), default_omega(MODEL, BITS))
    return replace(plan, estimate=estimate)


def apart(layers, resident=0, **options):
    return StageExperts(
        layers=tuple(LayerExperts(layer=n, resident=tuple(range(resident))) for n in layers),
        **options,
    )


WHOLE = plan_of()


def test_experts_on_the_device_change_nothing():
    found = plan_of(apart(range(LAYERS), 128))
    assert found.estimate == WHOLE.estimate


def test_bytes_move_from_the_device_to_its_host():
    found = plan_of(apart(range(LAYERS)))
    whole, parts = (plan.estimate.stages[0].memory for plan in (WHOLE, found))
    assert whole.host is None
    costs, work = costs_of_plan(WHOLE, MODEL), WHOLE.workload
    device, sizes = WHOLE.device_of(WHOLE.stages[0]), WHOLE.micro_batching
    buffers = costs.host_buffer_bytes(device, work, sizes, [(0, 4)])
    assert 0 < buffers < 0.03 * parts.host
    assert parts.weights + parts.host - buffers == whole.weights
    assert parts.host > 0.9 * whole.weights
    assert parts.kv == whole.kv
    assert parts.total == whole.total - (parts.host - buffers)


def test_a_plan_that_does_not_fit_fits_with_experts_apart():
    found = plan_of(apart(range(LAYERS), threads=8))
    assert verify_plan(WHOLE, "plan", profile_dir=None).excess_bytes > 0
    checked = verify_plan(found, "plan", profile_dir=None)
    assert checked.excess_bytes == 0
    assert not [warning for warning in checked.warnings if "estimate" in warning]


def test_what_the_host_has_no_memory_for_is_excess():
    own = plan_of(apart(range(LAYERS))).estimate.stages[0].memory.host
    small = plan_of(apart(range(LAYERS)), host=replace(HOST, memory_bytes=own - 5))
    assert verify_plan(small, "plan", profile_dir=None).excess_bytes == 5


@pytest.mark.parametrize("resident", [0, 40])
def test_forecast_and_closed_formula_agree(resident):
    """One stage: the simulated seconds are those of the formula, as for whole layers."""
    for plan in (WHOLE, plan_of(apart(range(0, LAYERS, 2), resident))):
        played = forecast(plan, costs_of_plan(plan, MODEL))
        assert played.latency_s == pytest.approx(plan.estimate.latency_s, rel=0.02)


def test_each_layer_apart_adds_the_same_seconds_and_bytes():
    stages = [plan_of(apart(range(n))).estimate.stages[0] for n in (1, 2, 5)]
    for one in (
        lambda stage: stage.decode_s,
        lambda stage: stage.prefill_s,
        lambda stage: stage.memory.weights,
    ):
        a, b, c = map(one, stages)
        assert c - b == pytest.approx(3 * (b - a), rel=1e-6)


def test_a_file_keeps_the_bytes_of_the_host(tmp_path):
    found = plan_of(apart(range(3)))
    write_plan(tmp_path / "plan.json", found)
    assert read_plan(tmp_path / "plan.json") == found
    assert "host" not in to_json(WHOLE)["estimate"]["stages"][0]["memory_bytes"]


def test_tables_and_summaries_say_what_is_on_the_host():
    found = plan_of(apart(range(3)))
    table = plan_table(found, {})
    assert "48x4, experts of 3 on the host" in table
    host = format_bytes(found.estimate.stages[0].memory.host)
    assert f"{host} on the host" in table
    assert "experts of 3 on the host" in found.summary()


def test_weights_of_a_layer_with_experts_apart_do_not_rest_on_disk():
    plan = plan_of(apart([2]))
    with_weights_on_disk(plan, {1, 3})
    with pytest.raises(SpecError, match=r"layers\[0\].layer': found 2, whose weights rest on disk"):
        with_weights_on_disk(plan, {1, 2})


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (apart([1], threads=9), r"stages\[0\].experts.threads.*found 9, expected at most the 8 of"),
        (
            StageExperts(layers=(LayerExperts(layer=1, resident=(3, 128)),)),
            r"stages\[0\].experts.layers\[0\].resident.*found 128, expected numbers of",
        ),
    ],
)
def test_what_the_cluster_cannot_run_is_named(experts, message):
    plan = plan_of(apart([1]))
    wrong = replace(plan, stages=(replace(plan.stages[0], experts=experts),))
    with pytest.raises(SpecError, match=message):
        verify_plan(wrong, "plan.json", profile_dir=None)


def test_types_of_hosts_are_kept_and_named():
    plan = plan_of()
    again = catalog.with_device_types(plan.cluster, [replace(XEON, gather_bytes_per_s=2e10)])
    assert again.device_types == (replace(XEON, gather_bytes_per_s=2e10),)
    group = DeviceGroup(type="RTX3060-12G", count=1, host=replace(HOST, type="5950x"))
    cluster = Cluster(name="box", nodes=(Node(name="box", devices=(group,)),))
    (device,) = catalog.with_known_types(cluster, "box.json").devices
    assert device.host.type == "Ryzen-9-5950X"
    unknown = replace(group, host=replace(HOST, type="5950z"))
    cluster = replace(cluster, nodes=(Node(name="box", devices=(unknown,)),))
    with pytest.raises(SpecError, match=r"box.json: field 'nodes\[0\].devices\[0\].host.type'"):
        catalog.with_known_types(cluster, "box.json")
