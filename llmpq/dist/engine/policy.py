"""The batching policy of a run: the requested one, else the strategy's own, else hybrid.

Needs no torch, so that a command can check a schedule before it starts a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmpq.batching import BatchingPolicy, PipelineShape, make_policy
from llmpq.batching.length import Prediction, make_predictor
from llmpq.dist.io.prompts import Request
from llmpq.errors import SpecError
from llmpq.spec.plan import Plan, Schedule


def schedule_of(plan: Plan, asked: Schedule | None) -> Schedule:
    """Return the schedule of a run.

    Raises:
        SpecError: it does not fit the plan's stages.
    """
    found = asked or plan.schedule or Schedule(policy="hybrid")
    if found.policy == "waa" and not plan.is_split:
        # On one ring, decode steps queue behind prefills, which WAA is to avoid.
        raise SpecError(
            "schedule: found policy 'waa' for stages that do both phases, expected a plan with "
            "stages of their own for either, as llmpq-algo --policy waa makes"
        )
    if plan.is_split and found.policy != "waa":
        raise SpecError(
            f"schedule: found policy '{found.policy}', expected 'waa': this plan has stages of "
            "their own for prefill and for decode"
        )
    return found


def in_order(requests: Sequence[Request]) -> list[Request]:
    """Return the requests in order of arrival; their indices are their numbers."""
    return sorted(requests, key=lambda request: request.arrival_s)


def policy_of(
    plan: Plan, schedule: Schedule, prediction: Prediction, requests: Sequence[Request]
) -> BatchingPolicy:
    """Return a new policy for these requests.

    The most tokens that a request asks for are the known length of its answer.
    """
    shape = PipelineShape.of(plan)
    ordered = in_order(requests)
    predictor = make_predictor(
        prediction,
        [len(request.prompt_token_ids) for request in ordered],
        [request.max_new_tokens for request in ordered],
    )
    return make_policy(schedule, shape, predictor)
