"""An independent certificate of a plan: its own arithmetic, none of the planner's.

It sums the cost models' figures layer by layer, without ``objective`` and the planner's arrays.
Every plan of every method must pass.
"""

from __future__ import annotations

import math

import pytest

from llmpq.assigner.request import PlanRequest, omega_of
from llmpq.costmodel import build_costs
from llmpq.spec.precision import Phase


def certify_plan(request: PlanRequest, plan) -> None:
    """Certify a plan of a request, by the request's own cost models and degradation."""
    omega = omega_of(request)
    bits = tuple(sorted(set(request.bits), reverse=True))
    costs = build_costs(
        request.model, request.cluster, dtype=request.dtype, kv_bits=request.kv_bits
    )
    certify(plan, costs, lambda layer, width: float(omega[layer, bits.index(width)]))


def certify(plan, costs, omega_of_layer) -> None:
    """Assert coverage, order, memory, price, quality and proof.

    Args:
        plan: the plan.
        costs: cost models of its model and cluster.
        omega_of_layer: callable ``(layer, bits) -> normalised degradation``.
    """
    _certify_coverage(plan, costs.model)
    certify_memory(plan, costs)
    latency_s = _certify_times(plan, costs)
    quality = math.fsum(omega_of_layer(layer, bits) for layer, bits in enumerate(plan.bits))
    assert plan.estimate.quality == pytest.approx(quality, rel=1e-9, abs=1e-12)
    objective_s = latency_s + plan.search.theta_s * quality
    assert plan.estimate.objective_s == pytest.approx(objective_s, rel=1e-9)
    search = plan.search
    if search.quality_budget is not None:
        assert quality <= search.quality_budget * (1 + 1e-8) + 1e-12
    if search.bound_s is not None:
        assert search.bound_s <= objective_s * (1 + 1e-9)
        assert search.gap == pytest.approx(1 - search.bound_s / objective_s, abs=1e-9)


def _certify_coverage(plan, model) -> None:
    covered = [
        layer for stage in plan.stages for layer in range(stage.first_layer, stage.end_layer)
    ]
    assert covered == list(range(model.num_layers))
    assert all(len(stage.bits) == stage.end_layer - stage.first_layer for stage in plan.stages)
    used = [stage.device for stage in plan.stages]
    assert sorted([*used, *plan.dropped_devices]) == list(range(len(plan.cluster.devices)))
    assert all(stage.bits for stage in plan.stages[1:])


def certify_memory(plan, costs) -> None:
    """Assert that every stage has the memory that its parts need, and states their sum."""
    work = plan.workload
    for stage, estimate in zip(plan.stages, plan.estimate.stages, strict=True):
        device = plan.cluster.devices[stage.device]
        needed = costs.runtime_bytes(device)
        needed += costs.temporary_bytes(
            device, work, plan.micro_batching, stage.rank == 0,
            is_last=stage.rank == len(plan.stages) - 1,
        )  # fmt: skip
        needed += costs.master_bytes(device) if stage.rank == 0 else 0
        for layer, bits in zip(range(stage.first_layer, stage.end_layer), stage.bits, strict=True):
            kind = costs.model.layer_kinds[layer]
            needed += costs.layer_weight_bytes(device, kind, bits)
            context = work.context_tokens or work.prompt_tokens + work.new_tokens
            needed += costs.layer_kv_bytes(kind, work.batch, context, device)
        assert needed <= costs.capacity_bytes(device)
        assert estimate.memory.total == needed
        assert estimate.capacity_bytes == costs.capacity_bytes(device)


def _certify_times(plan, costs) -> float:
    """Return the latency, summed here from single layers and links."""
    work, micro = plan.workload, plan.micro_batching
    context = work.prompt_tokens + work.new_tokens / 2
    prefill, decode, links = [], [], []
    devices = [plan.cluster.devices[stage.device] for stage in plan.stages]
    for number, stage in enumerate(plan.stages):
        here = devices[number]
        kinds = costs.model.layer_kinds[stage.first_layer : stage.end_layer]
        pre_s = [
            costs.layer_s(here, Phase.PREFILL, bits, micro.prefill, work.prompt_tokens, kind)
            for kind, bits in zip(kinds, stage.bits, strict=True)
        ]
        dec_s = [
            costs.layer_s(here, Phase.DECODE, bits, micro.decode, context, kind)
            for kind, bits in zip(kinds, stage.bits, strict=True)
        ]
        if number == 0:
            pre_s.append(costs.master_s(here, Phase.PREFILL, micro.prefill, work.prompt_tokens))
            dec_s.append(costs.master_s(here, Phase.DECODE, micro.decode, 1))
        prefill.append(math.fsum(pre_s))
        decode.append(math.fsum(dec_s))
        is_last = number == len(devices) - 1
        there = devices[0] if is_last else devices[number + 1]
        tokens = 1 if is_last else work.prompt_tokens
        alone = len(devices) == 1
        links.append(
            (
                0.0 if alone else costs.send_s(here, there, Phase.PREFILL, micro.prefill, tokens),
                0.0 if alone else costs.send_s(here, there, Phase.DECODE, micro.decode, 1),
            )
        )
    stored = plan.estimate.stages
    assert [item.prefill_s for item in stored] == pytest.approx(prefill, rel=1e-9)
    assert [item.decode_s for item in stored] == pytest.approx(decode, rel=1e-9)
    assert [(item.send_prefill_s, item.send_decode_s) for item in stored] == links
    latency_s = _latency(plan, prefill, decode, links)
    assert plan.estimate.latency_s == pytest.approx(latency_s, rel=1e-9)
    return latency_s


def _latency(plan, prefill, decode, links) -> float:
    work, micro = plan.workload, plan.micro_batching
    mu_pre = math.ceil(work.batch / micro.prefill)
    mu_dec = math.ceil(work.batch / micro.decode)
    rounds = work.new_tokens - 1
    slow_pre = max([*prefill, *(link[0] for link in links)])
    slow_dec = max([*decode, *(link[1] for link in links)])
    if plan.search.formula == "paper":
        return (
            (mu_pre - 1) * slow_pre
            + math.fsum(prefill)
            + rounds * (mu_dec - 1) * slow_dec
            + math.fsum(decode)
        )
    one_pass = math.fsum([*decode, *(link[1] for link in links)])
    return (
        (mu_pre - 1) * slow_pre
        + math.fsum([*prefill, *(link[0] for link in links)])
        + rounds * max(mu_dec * slow_dec, one_pass)
    )
