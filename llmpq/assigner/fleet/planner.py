"""Planning a fleet: checks of the request, and the search for its objective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from llmpq.assigner.constraints.resolve import Overrides
from llmpq.assigner.exact.lattice import has_few_orders
from llmpq.assigner.fleet.rate_search import RateSearch
from llmpq.assigner.fleet.search import FleetLimits, FleetPlan, FleetSearch
from llmpq.assigner.objective import FloatArray
from llmpq.assigner.planner import make_plan
from llmpq.assigner.request import (
    OutOfTimeError,
    PlanRequest,
    Progress,
    build_task,
    head_loss,
    omega_of,
    silent,
)
from llmpq.errors import InfeasibleError, SpecError
from llmpq.options.plan import OrderMode
from llmpq.spec.cluster import Cluster
from llmpq.spec.plan import Plan

TIME_LIMIT_S = 20.0
"""Seconds after which the best fleet so far is returned, where the request sets no limit."""
MOST_CELLS = 2_000
"""Cells of the order graph up to which all orders are searched by default: parts are many."""
ONE_SHARE = 0.25
"""Part of the time limit in which one pipeline is planned, for the default quality budget."""
BUDGET_TOLERANCE = 1.1
LEAST_BUDGET = 0.01
"""The default budget: what one pipeline loses with a tenth more, to two digits, and at least a
hundredth of what 4 bits lose. Below, a difference costs less latency than 1 % by default."""


def plan_fleet(
    request: PlanRequest,
    number: int | None = None,
    *,
    rate: float | None = None,
    same_bits: bool = False,
    command: str = "",
    progress: Progress = silent,
) -> FleetPlan:
    """Cut a cluster into replicas, for the most requests a second in sum or the least mean TTFT.

    Args:
        request: what to plan; its batch is the most sequences of all replicas together. Without a
            quality budget, it is ``default_budget``.
        number: number of replicas, ``None`` for the best.
        rate: requests that arrive in a second, at random, for the least mean time to first token
            (TTFT); ``None`` for the most requests a second.
        same_bits: give a layer the same bits in all replicas: one bitwidth for all layers, or the
            bits of the one pipeline.
        command: for the plans' provenance.
        progress: called with parts priced, parts in all, and the seconds a request so far.

    Raises:
        SpecError: the request does not suit a fleet.
        InfeasibleError: no such fleet exists, or none was found in time.
    """
    _check(request, number, rate)
    # Replicas of a host would share its disk and its cores.
    request = replace(request, no_streaming=True, whole_layers=True)
    if request.time_limit_s is None:
        request = replace(request, time_limit_s=TIME_LIMIT_S)
    request = request.with_deadline()
    budget = request.quality_budget
    one = _one_pipeline(request) if budget is None or same_bits else None
    if budget is None and one is not None:
        budget = default_budget(one.estimate.quality)
    request = replace(
        request, quality_budget=budget, theta_s=0.0, orders=_orders_of_all_parts(request)
    )

    def search(own: PlanRequest) -> FleetSearch:
        if rate is None:
            return FleetSearch(own, number, progress)
        return RateSearch(own, number, rate, progress)

    requests = [request] if one is None or not same_bits else _with_same_bits(request, one)
    searches = [search(own) for own in requests]
    for own in searches:
        own.run()
    found = [own for own in searches if own.fleet]
    if not found:
        if request.deadline.has_passed:
            raise OutOfTimeError(f"found no fleet within {request.time_limit_s:g} s")
        raise InfeasibleError(
            f"{number or 'any'} replicas of {request.model.name} do not fit on "
            f"{request.cluster.name} with a degradation of at most {budget:.4g} each"
            + "".join(f"; {text}" for text in crowded_hosts(request.cluster))
            + _at_rate(searches, rate)
        )
    best = max(found, key=lambda own: own.value)
    bound = max(own.bound for own in searches)
    result = best.result(bound, command)
    return replace(result, limits=_limits(request, result))


def crowded_hosts(cluster: Cluster) -> list[str]:
    """Return a text about each host on which not all workers have cores of their own."""
    return [
        f"{node.name} has {node.cores} cores for {node.worker_threads} threads of workers, and "
        "replicas do not share cores"
        for node in cluster.nodes
        if node.cores is not None and node.worker_threads > node.cores
    ]


def default_budget(quality: float) -> float:
    """Return the quality budget of every replica where one pipeline loses ``quality``."""
    wanted = BUDGET_TOLERANCE * quality
    return max(LEAST_BUDGET, rounded_up(wanted))


def rounded_up(value: float) -> float:
    """Return a value rounded up to two digits."""
    if not value:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.6g}")


def _one_pipeline(request: PlanRequest) -> Plan:
    """Return the plan of one pipeline over the whole cluster, in a part of the time limit."""
    assert request.time_limit_s is not None
    deadline = request.deadline.within(ONE_SHARE * request.time_limit_s)
    return make_plan(replace(request, deadline=deadline))


def _orders_of_all_parts(request: PlanRequest) -> OrderMode:
    """Return orders of devices that are searched in the whole cluster as in all of its parts.

    A part then has no order that a larger one does not have, so more devices never make less.
    """
    task = build_task(request)
    if not task.pairs:
        return request.orders
    is_all = has_few_orders(task.space, request.orders, MOST_CELLS)
    return "all" if is_all else "types"


def _limits(request: PlanRequest, found: FleetPlan) -> FleetLimits:
    """Return what keeps a fleet from being better, with the quality budget."""
    limits = found.limits
    if found.status == "optimal":
        limits = replace(limits, time_limit_s=None)
    budget = request.quality_budget
    if budget is None or request.overrides.layer_bits:
        return limits
    bits = sorted(request.bits, reverse=True)
    omega = omega_of(replace(request, bits=tuple(bits)))
    if any(_may_narrow(replica.plan, omega, bits, budget) for replica in found.replicas):
        return limits
    lost = omega.sum(axis=0) + head_loss(request)
    for width, quality in zip(bits, lost.tolist(), strict=True):
        if quality > budget:
            return replace(limits, budget=rounded_up(quality), bits=width)
    return limits


def _may_narrow(plan: Plan, omega: FloatArray, bits: Sequence[int], budget: float) -> bool:
    """Whether the budget leaves some layer of a plan the next fewer bits."""
    places = [bits.index(width) for width in plan.bits]
    return any(
        plan.estimate.quality + omega[layer, place + 1] - omega[layer, place] <= budget
        for layer, place in enumerate(places)
        if place + 1 < len(bits)
    )


def _at_rate(searches: Sequence[FleetSearch], rate: float | None) -> str:
    """Return why a rate is too high, if that is the reason."""
    if rate is None:
        return ""
    most = max(search.most_arrivals() for search in searches if isinstance(search, RateSearch))
    return f", or answer fewer than {rate:g} requests/s: {most:.4g} at most" if most else ""


def _check(request: PlanRequest, number: int | None, rate: float | None) -> None:
    if rate is not None and not 0 < rate < math.inf:
        raise SpecError(f"rate: found {rate}, expected requests a second, more than 0")
    if number is not None and not 1 <= number <= len(request.cluster.devices):
        raise SpecError(
            f"replicas: found {number}, expected 1 to {len(request.cluster.devices)}, the devices"
        )
    if request.formula != "steady":
        raise SpecError("replicas: found formula 'paper', expected 'steady'")
    others = replace(request.overrides, layer_bits=())
    if others:
        option = others.options()[0]
        raise SpecError(
            f"replicas: found with {option}, expected no manual decisions but the bits of layers"
        )


def _with_same_bits(request: PlanRequest, one: Plan) -> list[PlanRequest]:
    """Return a request for each vector of bits that all replicas may have."""
    if request.overrides.layer_bits:
        return [request]
    found = [replace(request, bits=(width,)) for width in request.bits]
    layers = tuple((layer, layer + 1, bits) for layer, bits in enumerate(one.bits))
    if len(set(one.bits)) > 1:
        found.append(replace(request, overrides=Overrides(layer_bits=layers)))
    return found
