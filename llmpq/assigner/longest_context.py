"""A plan for a host whose user states no lengths.

It has the longest context that fits, up to the model's own, at bits that lose next to nothing (8 or
more) and with next to the speed that answers have with ``SHORT_CONTEXT`` tokens; among such plans
it is the fastest for requests of usual lengths. Where even ``SHORT_CONTEXT`` tokens do not fit so,
it loses the least quality with them, and then has a shorter context. A model that does not fit at
any bits reads weights from disk, where that is allowed and the disk's speed is known. A long
context is not worth bits or speed: few answers come near it, and every answer has them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from llmpq.assigner.constraints.fixed_bits import with_stored_bits
from llmpq.assigner.explain.infeasible import SMALLEST
from llmpq.assigner.objective import QUALITY_SLACK
from llmpq.assigner.planner import best_plan, solve_request
from llmpq.assigner.request import NO_PLAN, PlanRequest
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.cluster import Cluster
from llmpq.spec.plan import Plan
from llmpq.spec.workload import Workload

SHORT_CONTEXT = 8192
"""Tokens of prompt and answer that few bits are worth."""
LEAST_CONTEXT = 512
UNLIMITED_CONTEXT = 131072
"""Longest context that is tried for a model without a limit."""
USUAL_PROMPT, USUAL_ANSWER = 256, 512
"""Tokens of the requests for which a plan is fast, or of shorter ones where that is its context."""
NEXT_TO = 0.9
"""Share of the speed with ``SHORT_CONTEXT`` tokens that answers keep with a longer context, unless
its length is asked for: layers on a slower device make room for it."""
NEAR_LOSSLESS = ((2**4 - 1) / (2**8 - 1)) ** 2
"""Loss of all layers at 8 bits, where it was not measured (``request.DEFAULT_OMEGA``)."""
LEAST_LOSS_THETA_S = 1e9
"""Seconds that the loss of all layers at 4 bits is worth: more than any difference of speed."""


def plan_longest_context(
    request: PlanRequest,
    max_model_len: int | None = None,
    *,
    others: Sequence[Cluster] = (),
    usual: tuple[int, int] | None = None,
    command: str = "",
) -> Plan:
    """Return a plan without given lengths.

    Args:
        request: its workload gives the number of sequences; their lengths are chosen here.
        max_model_len: tokens of prompt and answer together, ``None`` for the longest that fit.
        others: clusters that the plan may be for instead of the request's: the best of all plans is
            returned.
        usual: tokens of prompt and answer of the requests for which the plan is fast, together no
            more than ``max_model_len``; ``None`` where they are not known.
        command: the command line, for the plan's provenance.

    Raises:
        SpecError: ``max_model_len`` is below 2, or longer than the model allows.
        InfeasibleError: the model does not fit at any bits with the shortest context.
    """
    if max_model_len is not None and max_model_len < 2:
        raise SpecError(f"max_model_len: found {max_model_len}, expected at least 2")
    clusters = (request.cluster, *others)
    last: PlanRequest | None = None
    least: float | None = None
    resident = replace(request, no_streaming=True)
    for context, aims in _attempts(resident, max_model_len):
        last = _with_context(resident, context, usual, aims)
        found = _plan_or_none(last, clusters, command)
        if found is None:
            continue
        if max_model_len is not None or context <= SHORT_CONTEXT:
            return found
        if least is None:
            wanted = _with_context(resident, SHORT_CONTEXT, usual, aims)
            short = _plan_or_none(wanted, clusters, command)
            assert short is not None, "it fits with a longer context"
            least = NEXT_TO * _speed(short)
        if _speed(found) >= least:
            return found
    assert last is not None
    attempts = () if request.no_streaming else _reading_attempts(request, max_model_len)
    for context, aims in attempts:
        found = _plan_or_none(_with_context(request, context, usual, aims), clusters, command)
        if found is not None:
            return found
    return best_plan(last, clusters, command=command)  # raises the error with its reasons


def _plan_or_none(request: PlanRequest, clusters: Sequence[Cluster], command: str) -> Plan | None:
    """Return the best plan on any of the clusters, ``None`` where nothing fits.

    Most attempts without a plan are followed by others: why they fail is not asked for.
    """
    request = replace(request, gives_reasons=False)
    try:
        if request.theta_s == LEAST_LOSS_THETA_S and request.workload.batch > 1:
            budget = _least_loss(request, clusters)
            request = replace(request, theta_s=None, quality_budget=budget)
        return best_plan(request, clusters, command=command)
    except InfeasibleError:
        return None


def _reading_attempts(
    request: PlanRequest, max_model_len: int | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield contexts and aims of a plan that reads weights from disk, the best first.

    Memory is worth speed then, so contexts are short; it loses no more than layers at 4 bits, as
    long as there is such a plan.
    """
    contexts = [max_model_len or min(request.model.max_positions or SHORT_CONTEXT, SHORT_CONTEXT)]
    while max_model_len is None and contexts[-1] // 2 >= LEAST_CONTEXT:
        contexts.append(contexts[-1] // 2)
    at_4_bits = {"quality_budget": 1.0 + 1e-9, "theta_s": None}
    for aims in ({},) if request.model.stored else (at_4_bits, {}):
        yield from ((context, aims) for context in contexts)


def _with_context(
    request: PlanRequest, context: int, usual: tuple[int, int] | None, aims: dict[str, Any]
) -> PlanRequest:
    if usual is None:
        answer = max(1, min(USUAL_ANSWER, context // 4))
        usual = min(USUAL_PROMPT, context - answer), answer
    prompt, answer = usual
    work = Workload(
        batch=request.workload.batch,
        prompt_tokens=prompt,
        new_tokens=answer,
        context_tokens=context,
    )
    return with_stored_bits(replace(request, workload=work, **aims))


def _least_loss(request: PlanRequest, clusters: Sequence[Cluster]) -> float:
    """Return the least degradation that memory allows on any of the clusters.

    Micro-batches of one sequence take the least memory, so that no others have to be searched: at
    a high price of degradation, bounds would hardly tell them apart.

    Raises:
        InfeasibleError: nothing fits.
    """
    overrides = replace(request.overrides, micro_batching=SMALLEST)
    found = []
    for cluster in clusters:
        with contextlib.suppress(InfeasibleError):
            own = replace(request, cluster=cluster, overrides=overrides)
            found.append(solve_request(own, "llmpq")[1].evaluation.quality)
    if not found:
        raise InfeasibleError(NO_PLAN)
    return min(found) * (1 + QUALITY_SLACK)


def _speed(plan: Plan) -> float:
    """Return the tokens a second of an answer."""
    return plan.answer_tokens_per_s or 0.0


def _attempts(
    request: PlanRequest, max_model_len: int | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield contexts and what to aim at, the best first."""
    own = request.model.max_positions or UNLIMITED_CONTEXT
    contexts = [max_model_len or own]
    short = min(contexts[0], SHORT_CONTEXT)
    while max_model_len is None and contexts[-1] // 2 >= LEAST_CONTEXT:
        half = contexts[-1] // 2
        contexts.append(short if half < short < contexts[-1] else half)
    is_stored = bool(request.model.stored)
    if not is_stored and max(request.bits) >= 8:
        budget = {"quality_budget": _loss_at_8_bits(request), "theta_s": None}
        yield from ((context, budget) for context in contexts if context >= short)
    aims: dict[str, Any] = {} if is_stored else {"theta_s": LEAST_LOSS_THETA_S}
    for context in contexts:
        if is_stored or context <= short:
            yield context, aims


def _loss_at_8_bits(request: PlanRequest) -> float:
    table = request.sensitivity
    loss = NEAR_LOSSLESS if table is None else sum(row[0] for row in table.normalised((8,)))
    return loss * (1 + 1e-9)
