"""Schedule: which batching policy a plan runs under, and its control variables.

It is part of a strategy file, so that what was searched is what is obeyed. A strategy without one
runs hybrid micro-batches (LLM-PQ).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, cast, get_args

from llmpq.errors import SpecError
from llmpq.spec.fields import Fields

PolicyName = Literal["hybrid", "static", "iteration", "rra", "waa", "multibin"]
POLICY_NAMES: tuple[str, ...] = get_args(PolicyName)

MAX_COUNT = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleEstimate:
    """What a schedule is expected to do.

    Attributes:
        requests_per_s: finished requests a second in the steady state.
        latency_s: of an answer of ``new_tokens`` tokens, from the start of its prefill.
        new_tokens: the answer that the latency bound is for, such as the 99th percentile's.
        latency_bound_s: what was asked for, ``None`` without a bound.
    """

    requests_per_s: float
    latency_s: float
    new_tokens: int
    latency_bound_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A policy and its control variables; what a policy does not know is ``None``.

    Attributes:
        policy: its name.
        encode_batch: RRA, WAA: requests encoded at a time on average ``B_E``.
        decode_batch: RRA, WAA: sequences decoded together on average ``B_D``. Static, multi-bin:
            requests of a batch.
        decode_iterations: RRA: iterations between two encodings ``N_D``.
        threshold: RRA, WAA: how far batches may be from their mean, as a share of it.
        mean_prompt_tokens: RRA, WAA: mean prompt, for even encoding work.
        mean_new_tokens: RRA, WAA: mean answer it was made for, by which drift is told.
        boundaries: multi-bin: lengths between the bins, rising.
        max_wait_s: static, multi-bin: longest wait for a batch to fill.
        holds_finished: static, multi-bin: whether ended sequences stay until the batch is done.
        estimate: what it is expected to do.
    """

    policy: PolicyName
    encode_batch: int | None = None
    decode_batch: int | None = None
    decode_iterations: int | None = None
    threshold: float | None = None
    mean_prompt_tokens: float | None = None
    mean_new_tokens: float | None = None
    boundaries: tuple[float, ...] | None = None
    max_wait_s: float | None = None
    holds_finished: bool | None = None
    estimate: ScheduleEstimate | None = None

    def __post_init__(self) -> None:
        if self.policy not in POLICY_NAMES:
            raise SpecError(
                f"schedule: field 'policy': found '{self.policy}', "
                f"expected one of {', '.join(POLICY_NAMES)}"
            )
        needed, allowed = _FIELDS[self.policy]
        for item in fields(self):
            if item.name in ("policy", "estimate"):
                continue
            value = getattr(self, item.name)
            if value is None and item.name in needed:
                raise SpecError(f"schedule: policy '{self.policy}' needs the field '{item.name}'")
            if value is not None and item.name not in needed + allowed:
                raise SpecError(
                    f"schedule: field '{item.name}': found {value}, but policy '{self.policy}' "
                    "knows no such thing"
                )


_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "hybrid": ((), ()),
    "iteration": ((), ()),
    "static": (("decode_batch",), ("max_wait_s", "holds_finished")),
    "multibin": (("decode_batch", "boundaries"), ("max_wait_s", "holds_finished")),
    "rra": (
        ("encode_batch", "decode_batch", "decode_iterations"),
        ("threshold", "mean_prompt_tokens", "mean_new_tokens"),
    ),
    "waa": (
        ("encode_batch", "decode_batch"),
        ("threshold", "mean_prompt_tokens", "mean_new_tokens"),
    ),
}
"""For every policy the fields it needs and those it may have besides."""


def default_schedule(policy: PolicyName, num_slots: int) -> Schedule:
    """Return a schedule for a policy that nobody searched one for.

    Static and multi-bin fill every slot; RRA and WAA keep the slots full by encoding an eighth of
    them at a time, and RRA decodes eight iterations between. Multi-bin has one bin.
    """
    plain: dict[str, dict[str, Any]] = {"hybrid": {}, "iteration": {}}
    batch = {"decode_batch": num_slots}
    eighth = batch | {"encode_batch": max(1, num_slots // 8)}
    values: dict[str, dict[str, Any]] = plain | {
        "static": batch,
        "multibin": batch | {"boundaries": ()},
        "rra": eighth | {"decode_iterations": 8},
        "waa": eighth,
    }
    return Schedule(policy=policy, **values[policy])


def schedule_from_fields(fields_: Fields) -> Schedule:
    """Build a schedule from its JSON object, strictly."""
    found = Schedule(
        policy=cast(PolicyName, fields_.text("policy", POLICY_NAMES)),
        encode_batch=fields_.optional_integer("encode_batch", minimum=1, maximum=MAX_COUNT),
        decode_batch=fields_.optional_integer("decode_batch", minimum=1, maximum=MAX_COUNT),
        decode_iterations=fields_.optional_integer(
            "decode_iterations", minimum=1, maximum=MAX_COUNT
        ),
        threshold=fields_.optional_number("threshold"),
        mean_prompt_tokens=fields_.optional_number("mean_prompt_tokens"),
        mean_new_tokens=fields_.optional_number("mean_new_tokens", minimum=1.0),
        boundaries=_boundaries(fields_),
        max_wait_s=fields_.optional_number("max_wait_s"),
        holds_finished=fields_.flag("holds_finished") if fields_.has("holds_finished") else None,
        estimate=_estimate(fields_.child("estimate")) if fields_.has("estimate") else None,
    )
    fields_.done()
    return found


def schedule_to_json(schedule: Schedule) -> dict[str, Any]:
    """Return the JSON object of a schedule, without what its policy does not know."""
    value: dict[str, Any] = {}
    for item in fields(schedule):
        found = getattr(schedule, item.name)
        if found is not None:
            value[item.name] = list(found) if isinstance(found, tuple) else found
    if schedule.estimate is not None:
        value["estimate"] = {
            "requests_per_s": schedule.estimate.requests_per_s,
            "latency_s": schedule.estimate.latency_s,
            "new_tokens": schedule.estimate.new_tokens,
            "latency_bound_s": schedule.estimate.latency_bound_s,
        }
    return value


def _boundaries(fields_: Fields) -> tuple[float, ...] | None:
    if not fields_.has("boundaries"):
        return None
    values = fields_.items("boundaries")
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(values) or numbers != sorted(numbers):
        raise fields_.error("boundaries", values, "rising numbers of tokens")
    return tuple(float(number) for number in numbers)


def _estimate(child: Fields) -> ScheduleEstimate:
    found = ScheduleEstimate(
        requests_per_s=child.number("requests_per_s"),
        latency_s=child.number("latency_s"),
        new_tokens=child.integer("new_tokens", minimum=1),
        latency_bound_s=child.optional_number("latency_bound_s"),
    )
    child.done()
    return found
