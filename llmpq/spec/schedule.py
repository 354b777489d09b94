"""Schedule: the batching policy of a plan and its control variables; and its draft model.

They are part of the strategy file, so that a run obeys what was searched. A strategy without a
schedule runs hybrid micro-batches (LLM-PQ), one without a draft model has no drafts of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args

from llmpq.errors import SpecError
from llmpq.spec.codec import Rule
from llmpq.spec.precision import BITS

PolicyName = Literal["hybrid", "static", "iteration", "rra", "waa", "multibin"]
POLICY_NAMES: tuple[str, ...] = get_args(PolicyName)

Count = Annotated[int, Rule(minimum=1, maximum=1_000_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleEstimate:
    """Expected performance of a schedule.

    Attributes:
        requests_per_s: finished requests per second in steady state.
        latency_s: of an answer of ``new_tokens`` tokens (such as the 99th percentile), from the
            start of its prefill.
        latency_bound_s: requested bound, ``None`` without one.
    """

    requests_per_s: float
    latency_s: float
    new_tokens: Annotated[int, Rule(minimum=1)]
    latency_bound_s: Annotated[float | None, Rule(null=True)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A policy and its control variables; variables of other policies are ``None``.

    Attributes:
        policy: its name.
        encode_batch: RRA, WAA: mean number of requests encoded at a time, ``B_E``.
        decode_batch: RRA, WAA: mean number of sequences decoded together, ``B_D``. Static,
            multi-bin: requests of a batch.
        decode_iterations: RRA: iterations between two encodings, ``N_D``.
        threshold: RRA, WAA: largest relative deviation of a batch from its mean.
        mean_prompt_tokens: RRA, WAA: mean prompt length, to balance encoding work.
        mean_new_tokens: RRA, WAA: mean answer length it was made for, to detect workload shift.
        boundaries: multi-bin: lengths between the bins, rising.
        max_wait_s: static, multi-bin: longest wait for a batch to fill.
        holds_finished: static, multi-bin: whether finished sequences keep their slots until the
            whole batch is done.
        estimate: expected performance.
    """

    policy: PolicyName
    encode_batch: Count | None = None
    decode_batch: Count | None = None
    decode_iterations: Count | None = None
    threshold: float | None = None
    mean_prompt_tokens: float | None = None
    mean_new_tokens: Annotated[float | None, Rule(minimum=1)] = None
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
                    "has no such field"
                )
        if self.boundaries is not None and any(a > b for a, b in pairwise(self.boundaries)):
            raise SpecError(
                f"schedule: field 'boundaries': found {list(self.boundaries)}, "
                "expected rising numbers of tokens"
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
"""Required and optional fields of every policy."""


def default_schedule(policy: PolicyName, num_slots: int) -> Schedule:
    """Return a schedule of a policy without a search.

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


ACCEPTANCE_RATE = 0.7
"""Probability that a draft token is right where it is not known."""
DRAFT_HEAD_BITS = 8
"""Bits of the head of a draft model whose layers are rounded to fewer than 16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDraft:
    """The draft model of a plan: where it runs, and what it is expected to do.

    Attributes:
        model: directory of its weights, or its name.
        bits: of its layers, ``None`` as stored.
        num_speculative_tokens: most draft tokens of a sequence in a step.
        device: index into ``cluster.devices``. On that of stage 0 it runs in the process of rank
            0, elsewhere in one of its own.
        acceptance_rate: chance that a draft token is right, once those before it are.
        cost: seconds of a draft token of one sequence, in decode steps of one sequence.
        handover: seconds of sending the token ids of a step to its process and back, in such
            steps; ``None`` in the process of rank 0.
        speedup: seconds of decoding without drafts, over those with them.
        memory_bytes: weights, KV blocks and temporary memory on its device; in a process of its
            own also those of the runtime.
    """

    model: str
    bits: int | None = None
    num_speculative_tokens: Annotated[int, Rule(minimum=1)]
    device: int
    acceptance_rate: Annotated[float, Rule(maximum=1)]
    cost: float
    handover: float | None = None
    speedup: float
    memory_bytes: int

    def __post_init__(self) -> None:
        if self.bits not in (None, *BITS):
            raise SpecError(f"plan: field 'draft.bits': found {self.bits}, expected some of {BITS}")


def draft_bytes(draft: PlannedDraft | None, device: int) -> int:
    """Return the bytes that a plan's draft model takes on a device of the cluster."""
    return 0 if draft is None or draft.device != device else draft.memory_bytes
