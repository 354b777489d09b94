"""Create the policy of a schedule."""

from __future__ import annotations

from dataclasses import dataclass

from llmpq.batching.policies.hybrid import HybridPolicy
from llmpq.batching.policies.iteration import IterationPolicy
from llmpq.batching.policies.multibin import MultiBinFormer
from llmpq.batching.policies.rra import Admission, RraPolicy
from llmpq.batching.policies.static import FirstComeFormer, StaticPolicy
from llmpq.batching.policies.waa import WaaPolicy
from llmpq.batching.policy_scheduler import BatchingPolicy
from llmpq.errors import SpecError
from llmpq.spec.plan import MicroBatching, Plan, Schedule
from llmpq.spec.precision import Phase

DEFAULT_THRESHOLD = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """Sizes of the pipeline that a policy uses.

    Attributes:
        micro_batching: maximum sequences of a micro-batch in each phase.
        num_slots: number of KV slots.
        num_stages: number of stages.
        prompt_tokens: of a prompt, as planned.
    """

    micro_batching: MicroBatching
    num_slots: int
    num_stages: int
    prompt_tokens: int = 0

    @classmethod
    def of(cls, plan: Plan) -> PipelineShape:
        """Return the sizes of a plan."""
        return cls(
            micro_batching=plan.micro_batching,
            num_slots=plan.workload.batch,
            num_stages=len(plan.path(Phase.DECODE)),
            prompt_tokens=plan.workload.prompt_tokens,
        )


def make_policy(schedule: Schedule, pipeline: PipelineShape) -> BatchingPolicy:
    """Return a new policy.

    Args:
        schedule: name and parameters of the policy.
        pipeline: sizes of the pipeline.

    Raises:
        SpecError: a batch is larger than the number of slots.
    """
    _check_slots(schedule, pipeline)
    sizes = pipeline.micro_batching
    if schedule.policy == "hybrid":
        return HybridPolicy(
            micro_batching=sizes,
            num_slots=pipeline.num_slots,
            num_stages=pipeline.num_stages,
            prompt_tokens=pipeline.prompt_tokens,
        )
    if schedule.policy == "iteration":
        return IterationPolicy(micro_batching=sizes)
    if schedule.policy == "rra":
        assert schedule.decode_iterations is not None
        return RraPolicy(
            admission=_admission(schedule),
            decode_iterations=schedule.decode_iterations,
            micro_batching=sizes,
        )
    if schedule.policy == "waa":
        return WaaPolicy(admission=_admission(schedule), micro_batching=sizes)
    return _static(schedule, sizes)


def _static(schedule: Schedule, sizes: MicroBatching) -> BatchingPolicy:
    assert schedule.decode_batch is not None
    batch, max_wait_s = schedule.decode_batch, schedule.max_wait_s
    former: FirstComeFormer | MultiBinFormer = FirstComeFormer(batch=batch, max_wait_s=max_wait_s)
    if schedule.policy == "multibin" and schedule.boundaries:
        former = MultiBinFormer(batch=batch, boundaries=schedule.boundaries, max_wait_s=max_wait_s)
    return StaticPolicy(
        former=former,
        micro_batching=sizes,
        holds_finished=schedule.holds_finished is not False,
    )


def _admission(schedule: Schedule) -> Admission:
    assert schedule.encode_batch is not None
    assert schedule.decode_batch is not None
    threshold = schedule.threshold
    return Admission(
        encode_batch=schedule.encode_batch,
        decode_batch=schedule.decode_batch,
        mean_prompt_tokens=schedule.mean_prompt_tokens or 0.0,
        threshold=DEFAULT_THRESHOLD if threshold is None else threshold,
    )


def _check_slots(schedule: Schedule, pipeline: PipelineShape) -> None:
    batch = schedule.decode_batch
    if batch is not None and batch > pipeline.num_slots:
        raise SpecError(
            f"schedule: field 'decode_batch': found {batch}, "
            f"expected at most the plan's {pipeline.num_slots} slots"
        )
