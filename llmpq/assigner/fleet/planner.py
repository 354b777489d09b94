"""Planning a fleet: checks of the request, and the search for its objective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from llmpq.assigner.constraints.overrides import Overrides
from llmpq.assigner.fleet.rate_search import RateSearch
from llmpq.assigner.fleet.search import FleetPlan, FleetSearch
from llmpq.assigner.planner import make_plan
from llmpq.assigner.request import OutOfTimeError, PlanRequest, Progress, silent
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.plan import Plan

TIME_LIMIT_S = 20.0
"""Seconds after which the best fleet so far is returned, where the request sets no limit."""


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
            quality budget, it is the degradation of one pipeline's plan over the whole cluster.
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
    if request.time_limit_s is None:
        request = replace(request, time_limit_s=TIME_LIMIT_S)
    request = request.with_deadline()
    budget = request.quality_budget
    one = make_plan(request) if budget is None or same_bits else None
    if budget is None and one is not None:
        budget = one.estimate.quality
    request = replace(request, quality_budget=budget, theta_s=0.0)
    requests = [request] if one is None or not same_bits else _with_same_bits(request, one)
    searches = [
        FleetSearch(own, number, progress)
        if rate is None
        else RateSearch(own, number, rate, progress)
        for own in requests
    ]
    for search in searches:
        search.run()
    found = [search for search in searches if search.fleet]
    if not found:
        if request.deadline.has_passed:
            raise OutOfTimeError(f"found no fleet within {request.time_limit_s:g} s")
        raise InfeasibleError(
            f"{number or 'any'} replicas of {request.model.name} do not fit on "
            f"{request.cluster.name} with a degradation of at most {budget:.4g} each"
            + _at_rate(searches, rate)
        )
    best = max(found, key=lambda search: search.value)
    bound = max(search.bound for search in searches)
    return best.result(bound, command)


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
