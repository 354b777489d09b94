"""Why a plan is as it is: what binds on each device, what each one left out would have cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmpq.assigner import PlanRequest
from llmpq.assigner.explain.binding import PlanBinding, binding_text, plan_binding
from llmpq.assigner.explain.explain import dropped_reasons
from llmpq.assigner.explain.what_if import Alternative, forced_use, one_more
from llmpq.assigner.planner import silent
from llmpq.assigner.task import Progress, costs_of
from llmpq.costmodel import ClusterCosts
from llmpq.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What is known of a plan besides itself.

    Attributes:
        binding: what binds on every stage.
        dropped: the figure that speaks against each device left out, by its index.
        forced: best plans that use a device left out, empty when not asked.
        more: best plans with one device more, empty when not asked.
    """

    binding: PlanBinding
    dropped: Mapping[int, str]
    forced: tuple[Alternative, ...] = ()
    more: tuple[Alternative, ...] = ()


def explain_costs(plan: Plan, costs: ClusterCosts) -> Explanation:
    """Explain a plan by its cost models alone."""
    return Explanation(binding=plan_binding(plan, costs), dropped=dropped_reasons(plan, costs))


def explain_plan(
    request: PlanRequest,
    plan: Plan,
    *,
    resolve: bool,
    more: bool,
    progress: Progress = silent,
) -> Explanation:
    """Explain a plan that was just made.

    Args:
        request: what was asked.
        plan: the plan.
        resolve: plan again for every kind of device left out.
        more: plan again with one more device of each kind.
        progress: told how many of the questions are answered.
    """
    found = explain_costs(plan, costs_of(request, plan.cluster))
    # Only this method can be told to use a device.
    ask = resolve and plan.search.method == "llmpq"
    return Explanation(
        binding=found.binding,
        dropped=_with_wishes(request, plan, found.dropped),
        forced=forced_use(request, plan, progress) if ask else (),
        more=one_more(request, plan, progress) if more else (),
    )


def explanation_text(plan: Plan, found: Explanation) -> Iterator[str]:
    """Yield the lines of an explanation that stand below a plan's table."""
    bound = found.binding
    phases = ("prefill", bound.prefill_by_slowest), ("decode", bound.decode_by_slowest)
    said = [
        f"{name} by {'its slowest stage' if slowest else 'one pass through all stages'}"
        for name, slowest in phases
    ]
    yield f"set by         {', '.join(said)}"
    for stage, item in zip(plan.stages, bound.stages, strict=True):
        yield f"binds          {stage.rank} {plan.device_of(stage).label}: {binding_text(item)}"
    for answer in found.forced:
        yield f"if used        {_named(answer.devices)}: {_cost_text(plan, answer)}"
    for answer in found.more:
        yield f"one more       {answer.devices[0]}: {_gain_text(plan, answer)}"


def explanation_record(plan: Plan, found: Explanation) -> dict[str, Any]:
    """Return an explanation for ``--json``."""
    devices = plan.cluster.devices
    record: dict[str, Any] = {
        "prefill_set_by": _set_by(found.binding.prefill_by_slowest),
        "decode_set_by": _set_by(found.binding.decode_by_slowest),
        "stages": [
            {
                "rank": item.rank,
                "device": plan.device_of(stage).label,
                "binding": list(item.constraints),
                "free_bytes": item.slack_bytes,
                "smallest_step_bytes": item.step_bytes,
                "prefill_share_of_slowest": item.prefill_share,
                "decode_share_of_slowest": item.decode_share,
                "master_share_of_decode": item.master_share,
                "text": binding_text(item),
            }
            for stage, item in zip(plan.stages, found.binding.stages, strict=True)
        ],
        "dropped": [
            {"device": devices[index].label, "reason": reason, **_forced_record(plan, found, index)}
            for index, reason in found.dropped.items()
        ],
    }
    if found.more:
        record["one_more"] = [
            {"device": answer.devices[0], **_answer_record(plan, answer)} for answer in found.more
        ]
    return record


def _with_wishes(request: PlanRequest, plan: Plan, dropped: Mapping[int, str]) -> dict[int, str]:
    """Say of a device that a person left out just that."""
    overrides = request.overrides
    found = dict(dropped)
    for index in dropped:
        item = plan.cluster.devices[index]
        called = {item.label, f"{item.node}/{item.type}", item.node, item.type}
        if called & set(overrides.exclude):
            found[index] = "as decided by --exclude"
        elif overrides.order and not called & set(overrides.order):
            found[index] = "as decided by --fix_order"
    return found


def _set_by(slowest: bool) -> str:
    return "slowest stage" if slowest else "one pass"


def _named(devices: Sequence[str]) -> str:
    return devices[0] + (f" (or {len(devices) - 1} alike)" if len(devices) > 1 else "")


def _cost_text(plan: Plan, answer: Alternative) -> str:
    if answer.plan is None:
        return answer.reason
    now, other = plan.estimate, answer.plan.estimate
    best = "the best plan" if answer.proven else "the best plan found"
    return (
        f"{best} that uses it costs {other.objective_s - now.objective_s:+.3g} s "
        f"({other.objective_s:.4g} s: latency {other.latency_s:.4g} s, quality lost "
        f"{other.quality:.3g})"
    )


def _gain_text(plan: Plan, answer: Alternative) -> str:
    if answer.plan is None:
        return answer.reason
    now, other = plan.throughput_tokens_per_s, answer.plan.throughput_tokens_per_s
    return (
        f"{other:.4g} tokens/s ({other / now - 1:+.1%}) at no more loss of quality"
        f"{'' if answer.proven else ', by the best plan found'}"
    )


def _forced_record(plan: Plan, found: Explanation, index: int) -> dict[str, Any]:
    label = plan.cluster.devices[index].label
    for answer in found.forced:
        if label in answer.devices:
            return {"if_used": _answer_record(plan, answer)}
    return {}


def _answer_record(plan: Plan, answer: Alternative) -> dict[str, Any]:
    if answer.plan is None:
        return {"status": "none", "reason": answer.reason}
    now, other = plan.estimate, answer.plan.estimate
    return {
        "status": "optimal" if answer.proven else "feasible",
        "latency_s": other.latency_s,
        "quality": other.quality,
        "objective_s": other.objective_s,
        "costs_s": other.objective_s - now.objective_s,
        "throughput_tokens_per_s": answer.plan.throughput_tokens_per_s,
        "throughput_gain": answer.plan.throughput_tokens_per_s / plan.throughput_tokens_per_s - 1,
    }
