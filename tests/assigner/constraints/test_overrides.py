"""Overrides: the best plan under them, and errors for contradictory ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from helpers.brute_force import brute_force
from helpers.builders import cluster_of, model_spec, plan_request, random_problem, sensitivity

from llmpq.assigner import make_plan
from llmpq.assigner.constraints.resolve import Limits, Overrides, obeys
from llmpq.assigner.milp.ilp import IlpOptions, solve_ilp
from llmpq.assigner.request import build_task
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.plan import MicroBatching

V100, T4, SECOND = "node0/V100-32G#0", "node1/T4-16G#0", "node1/T4-16G#1"


def request_of(**decisions):
    """Six layers on a V100 and two T4, each of which could hold them all."""
    return plan_request(
        cluster=cluster_of(("V100-32G", 1, 400), ("T4-16G", 2, 400)),
        overrides=Overrides(**decisions),
        theta_s=0.01,
    )


def held(plan) -> dict[str, tuple[int, int]]:
    return {
        plan.device_of(stage).label: (stage.first_layer, stage.end_layer) for stage in plan.stages
    }


def random_limits(seed: int, problem) -> Limits:
    rng = np.random.default_rng(seed)
    layers, widths = problem.omega.shape
    layer_widths = rng.random((layers, widths)) < 0.7
    layer_widths[~layer_widths.any(axis=1)] = True
    group_widths = rng.random((problem.num_positions, widths)) < 0.8
    ranges = []
    if rng.random() < 0.5:
        first = int(rng.integers(0, layers))
        end = int(rng.integers(first + 1, layers + 1))
        ranges.append((int(rng.integers(problem.num_positions)), first, end))
    used = (int(rng.integers(problem.num_positions)),) if rng.random() < 0.5 else ()
    return Limits(
        layer_widths=layer_widths, group_widths=group_widths, ranges=tuple(ranges), used=used
    )


@pytest.mark.parametrize("block", range(6))
def test_limited_programs_equal_brute_force(block: int) -> None:
    solved = 0
    for seed in range(25 * block, 25 * block + 25):
        problem = random_problem(seed)
        groups = tuple(range(problem.num_positions))
        wide = {
            name: np.resize(values, (len(groups), *values.shape[1:]))
            for name in ("prefill_s", "decode_s", "layer_bytes",
                         "host_bytes", "host_capacity_bytes", "stream_bytes", "stream_prefill_s",
                "stream_decode_s", "total_bytes", "runtime_bytes",
                         "temporary_bytes", "master_bytes", "master_prefill_s", "master_decode_s")
            for values in [getattr(problem.costs, name)]
        }  # fmt: skip
        square = {
            name: np.resize(getattr(problem.costs, name), (len(groups), len(groups)))
            for name in ("send_prefill_s", "send_decode_s", "return_prefill_s", "return_decode_s")
        }
        # A limit names a group of one device, so every position is a group of its own here.
        problem = replace(
            problem,
            costs=replace(problem.costs, **wide, **square),
            order=groups,
            limits=random_limits(seed, problem),
        )
        oracle = brute_force(problem)
        found = solve_ilp(problem, IlpOptions())
        if oracle is None:
            assert found.evaluation is None
            continue
        best_s = oracle[1].objective_s
        assert found.bound_s <= best_s * (1 + 1e-6) + 1e-12
        assert found.evaluation.objective_s == pytest.approx(best_s, rel=1e-7)
        chosen = found.assignment
        assert obeys(problem.limits, groups, chosen.positions, chosen.widths)
        solved += 1
    assert solved > 5


def test_the_whole_search_under_limits_equals_brute_force() -> None:
    model = model_spec(layers=4)
    request = plan_request(
        model=model,
        cluster=cluster_of(("V100-32G", 1, 75), ("T4-16G", 2, 45)),
        bits=(16, 8, 4),
        sensitivity=sensitivity(model),
        theta_s=0.05,
        overrides=Overrides(use=(SECOND,), layer_bits=((1, 2, 4),)),
    )
    task = build_task(request)
    oracles = [
        brute_force(task.problem(pair, order))
        for pair, order in product(task.pairs, task.orders()[1])
    ]
    best_s = min(oracle[1].objective_s for oracle in oracles if oracle is not None)
    plan = make_plan(request)
    assert plan.estimate.objective_s == pytest.approx(best_s, rel=1e-7)
    assert plan.bits[1] == 4
    assert SECOND in held(plan)


def test_excluded_devices_run_nothing_and_stay_in_the_plan() -> None:
    plan = make_plan(request_of(exclude=("node1/T4-16G",)))
    assert list(held(plan)) == [V100]
    assert plan.dropped_devices == (1, 2)
    first = make_plan(request_of(exclude=(V100, T4)))
    assert list(held(first)) == [SECOND]
    assert first.dropped_devices == (0, 1)


def test_a_used_device_holds_a_layer_although_it_costs() -> None:
    free = make_plan(request_of())
    assert SECOND not in held(free)
    forced = make_plan(request_of(use=(SECOND,)))
    first, end = held(forced)[SECOND]
    assert end > first
    assert forced.estimate.objective_s > free.estimate.objective_s


def test_layers_order_bits_and_batches_are_as_decided() -> None:
    plan = make_plan(
        request_of(
            layers=((SECOND, 0, 2), (V100, 2, 6)),
            layer_bits=((3, 5, 8),),
            device_bits=(("node1", 4),),
            micro_batching=MicroBatching(prefill=2, decode=1),
        )
    )
    assert held(plan) == {SECOND: (0, 2), V100: (2, 6)}
    assert plan.bits[:2] == (4, 4)
    assert plan.bits[3:5] == (8, 8)
    assert plan.micro_batching == MicroBatching(prefill=2, decode=1)
    ordered = make_plan(request_of(order=(T4, SECOND), use=(SECOND, T4)))
    assert list(held(ordered)) == [T4, SECOND]
    assert dict(ordered.provenance.inputs)["overrides"] == (
        f"--use {SECOND} --use {T4} --fix_order {T4} {SECOND}"
    )


def test_a_memory_cap_stands_in_the_plans_own_cluster() -> None:
    size = make_plan(request_of()).estimate.stages[0].capacity_bytes - 300 * 10**6
    plan = make_plan(request_of(memory=((V100, size),)))
    assert plan.cluster.devices[0].memory_bytes == size
    assert all(stage.memory.total <= stage.capacity_bytes for stage in plan.estimate.stages)
    assert [device.label for device in plan.cluster.devices] == [V100, T4, SECOND]
    one = make_plan(request_of(memory=((T4, size),)))
    assert one.cluster.devices[1].memory_bytes == size != one.cluster.devices[2].memory_bytes


@pytest.mark.parametrize(
    ("decisions", "message"),
    [
        ({"exclude": ("node1/T4-16G#2",)}, "--exclude: found no device 'node1/T4-16G#2'"),
        ({"exclude": ("node0", "node1")}, "found every device"),
        ({"exclude": (T4,), "use": (T4,)}, f"--use {T4}: found {T4}, which --exclude leaves out"),
        ({"order": (V100,), "use": (T4,)}, "which --fix_order leaves out"),
        ({"order": (V100, V100)}, "expected each device once"),
        ({"use": ("node1",)}, "expected one of them"),
        ({"layers": ((T4, 0, 4), (V100, 3, 6))}, "expected each once"),
        ({"layers": ((T4, 0, 7),)}, r"expected a range within \[0, 6\)"),
        ({"layers": ((T4, 0, 3), (V100, 3, 6)), "order": (V100, T4)}, "the other way round"),
        ({"memory": (("node1", 10**9), (T4, 10**8))}, f"two sizes for {T4}"),
        ({"layer_bits": ((0, 3, 4), (2, 4, 8))}, "gives some of these layers other bits"),
        ({"device_bits": ((T4, 4), ("T4-16G", 8))}, "found 4 and 8 bits"),
        ({"layers": ((T4, 0, 2),), "layer_bits": ((0, 1, 4),), "device_bits": ((T4, 8),)},
         "found other bits for"),
        ({"layer_bits": ((0, 3, 5),)}, "expected one of --bits"),
        ({"micro_batching": MicroBatching(prefill=1, decode=5)}, "micro-batches: found 1 and 5"),
    ],
)  # fmt: skip
def test_contradictory_overrides_raise_with_their_names(decisions: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make_plan(request_of(**decisions))


def test_layers_fixed_inside_a_group_raise() -> None:
    request = replace(request_of(layers=((T4, 0, 2),)), layer_group=3)
    with pytest.raises(SpecError, match="found layer 2 inside a group of --group"):
        make_plan(request)


def test_other_methods_raise_for_unsupported_overrides() -> None:
    with pytest.raises(SpecError, match=r"--use .*: found method 'uniform', expected llmpq"):
        make_plan(request_of(use=(T4,)), "uniform")
    plan = make_plan(request_of(exclude=(T4,)), "uniform")
    assert list(held(plan)) == [V100, SECOND]


def test_the_decision_that_leaves_no_plan_is_named() -> None:
    # Six layers of 25 MB at 16 bits do not fit into what 60 MB leave.
    small = make_plan(request_of()).estimate.stages[0].capacity_bytes - 340 * 10**6
    request = request_of(
        order=(V100,), layer_bits=((0, 6, 16),), memory=((V100, small),), exclude=(T4,)
    )
    with pytest.raises(InfeasibleError) as caught:
        make_plan(request)
    text = str(caught.value)
    assert "--fix_bits 0:6=16" in text
    assert "--memory_gib" in text
    assert "without any one of them there is one" in text
    assert "--exclude" not in text
