"""Micro-batches through stages in a row, one after another: the flow shop of the latency formulas.

Each stage processes micro-batches in order of arrival, links only delay.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmpq.sim import BatchShape, Hop, PipelineLayout, StepCosts, linear_layout
from llmpq.spec.plan import Plan, StageEstimate
from llmpq.spec.precision import Phase


class FlowShop:
    """Stages in a row; the master is first and also ends every micro-batch.

    ``spans`` holds start and end of the last micro-batch on each stage, in seconds.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._free_s = [0.0] * costs.layout.num_ranks
        self.spans: list[tuple[float, float]] = []

    def run(self, shape: BatchShape, ready_s: float) -> float:
        """Process a micro-batch that is ready at ``ready_s``; return when its tokens are known."""
        costs, free_s = self._costs, self._free_s
        start_s = max(ready_s, free_s[0])
        now_s = start_s + (costs.embed_s(shape) + costs.stage_s(0, shape))
        self.spans = [(start_s, now_s)]
        # The projection comes when the micro-batch is back; the master's time is spent either way.
        project_s = costs.project_s(shape)
        free_s[0] = now_s + project_s
        received_s = 0.0
        for stage in range(1, len(free_s)):
            end_s, delay_s = costs.hop(stage - 1, shape)
            free_s[stage - 1] += end_s
            start_s = max(now_s + end_s + delay_s, free_s[stage])
            now_s = start_s + (end_s + costs.stage_s(stage, shape))
            self.spans.append((start_s, now_s))
            free_s[stage] = now_s
        if len(free_s) > 1:
            end_s, delay_s = costs.hop(len(free_s) - 1, shape)
            free_s[-1] += end_s
            received_s = end_s
            now_s += end_s + delay_s
        return now_s + received_s + project_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One micro-batch on one stage; step 0 is prefill, then decode rounds are counted."""

    rank: int
    phase: Phase
    micro_batch: int
    step: int
    start_s: float
    end_s: float


def timeline(plan: Plan, decode_rounds: int) -> tuple[Block, ...]:
    """Return the blocks of prefill and of the first ``decode_rounds`` rounds, as they start."""
    pipeline = FlowShop(_EstimateCosts(plan.estimate.stages))
    work, sizes = plan.workload, plan.micro_batching
    blocks: list[Block] = []

    def run(phase: Phase, micro_batch: int, step: int, ready_s: float) -> float:
        done_s = pipeline.run(BatchShape(phase=phase, rows=1, longest=1, total=1), ready_s)
        blocks.extend(
            Block(
                rank=rank,
                phase=phase,
                micro_batch=micro_batch,
                step=step,
                start_s=start_s,
                end_s=end_s,
            )
            for rank, (start_s, end_s) in enumerate(pipeline.spans)
        )
        return done_s

    batches = -(-work.batch // sizes.prefill)
    prefilled_s = max(run(Phase.PREFILL, index, 0, 0.0) for index in range(batches))
    # As in the latency formulas, the whole batch is prefilled before it decodes.
    ready = [prefilled_s] * -(-work.batch // sizes.decode)
    for step in range(1, min(decode_rounds, work.new_tokens - 1) + 1):
        ready = [run(Phase.DECODE, index, step, start_s) for index, start_s in enumerate(ready)]
    return tuple(blocks)


class _EstimateCosts:
    """``StepCosts`` of a plan's estimate: a stage's seconds include the master's own work."""

    def __init__(self, stages: tuple[StageEstimate, ...]) -> None:
        self._stages = stages
        self.layout: PipelineLayout = linear_layout(len(stages))

    def stage_s(self, rank: int, shape: BatchShape) -> float:
        stage = self._stages[rank]
        return stage.prefill_s if shape.phase is Phase.PREFILL else stage.decode_s

    def hop(self, rank: int, shape: BatchShape) -> Hop:
        stage = self._stages[rank]
        is_prefill = shape.phase is Phase.PREFILL
        return Hop(0.0, stage.send_prefill_s if is_prefill else stage.send_decode_s)

    def embed_s(self, _: BatchShape) -> float:
        return 0.0

    project_s = handover_s = embed_s
