"""Which models fit on which devices, and how fast they answer: before any plan is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmpq.assigner.planner import make_plan
from llmpq.assigner.request import PlanRequest
from llmpq.costmodel import ClusterCosts
from llmpq.errors import InfeasibleError
from llmpq.spec.plan import MicroBatching, Plan
from llmpq.spec.precision import BITS
from llmpq.spec.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class FitAnswer:
    """Whether a model runs with every layer at ``bits``: its plan, or the reason why not.

    ``short`` is the reason in a few words.
    """

    bits: int
    plan: Plan | None = None
    reason: str | None = None
    short: str | None = None


def fit_answers(request: PlanRequest, widths: Sequence[int] = BITS) -> tuple[FitAnswer, ...]:
    """Plan a request with every layer at one bitwidth, for each of ``widths``."""
    answers = []
    for bits in widths:
        try:
            plan = make_plan(
                replace(request, bits=(bits,), theta_s=0.0, sensitivity=None), command="llmpq-check"
            )
            answers.append(FitAnswer(bits=bits, plan=plan))
        except InfeasibleError as error:
            answers.append(FitAnswer(bits=bits, reason=str(error), short=error.short))
    return tuple(answers)


def bytes_alone(costs: ClusterCosts, workload: Workload, bits: int) -> int:
    """Return the bytes of a whole model on the first device, every layer at ``bits``.

    Micro-batches are of one sequence, which takes the least memory.
    """
    device, model = costs.cluster.devices[0], costs.model
    kinds = model.layer_kinds
    kv = sum(
        costs.layer_kv_bytes(kind, workload.batch, workload.max_context_tokens, device)
        for kind in kinds
    )
    temporary = costs.temporary_bytes(
        device, workload, MicroBatching(prefill=1, decode=1), is_master=True, is_last=True,
        kv_bytes=kv,
    )  # fmt: skip
    weights = sum(costs.layer_weight_bytes(device, kind, bits) for kind in kinds)
    return costs.runtime_bytes(device) + costs.master_bytes(device) + weights + kv + temporary
