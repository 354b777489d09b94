"""When each stage works on what: a plan's pipeline played forward on its own estimate.

In-order stages, links that only delay. It is for drawing and for tests of the latency formulas;
it refuses to model requests that differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmpq.spec.plan import Plan
from llmpq.spec.precision import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One micro-batch on one stage.

    Attributes:
        rank: the stage.
        phase: prefill or decode.
        micro_batch: number of the micro-batch within its phase.
        step: 0 for prefill, then the number of the decode round.
        start_s, end_s: seconds since the batch arrived.
    """

    rank: int
    phase: Phase
    micro_batch: int
    step: int
    start_s: float
    end_s: float


def timeline(plan: Plan, decode_rounds: int) -> tuple[Block, ...]:
    """Return every block of prefill and of the first ``decode_rounds`` rounds, as they start."""
    run = _Run(plan)
    work = plan.workload
    prefill, decode = plan.micro_batching.prefill, plan.micro_batching.decode
    prefilled = [
        run.passes(Phase.PREFILL, index, 0, 0.0) for index in range(-(-work.batch // prefill))
    ]
    # As in the latency formulas, the whole batch is prefilled before it decodes.
    ready = [max(prefilled)] * -(-work.batch // decode)
    for step in range(1, min(decode_rounds, work.new_tokens - 1) + 1):
        ready = [
            run.passes(Phase.DECODE, index, step, start_s) for index, start_s in enumerate(ready)
        ]
    return tuple(run.blocks)


class _Run:
    def __init__(self, plan: Plan) -> None:
        self.stages = plan.estimate.stages
        self.free_s = [0.0] * len(self.stages)
        self.blocks: list[Block] = []

    def passes(self, phase: Phase, micro_batch: int, step: int, ready_s: float) -> float:
        """Send one micro-batch through all stages; return when the master has it back."""
        for rank, stage in enumerate(self.stages):
            prefill = phase is Phase.PREFILL
            start_s = max(ready_s, self.free_s[rank])
            end_s = start_s + (stage.prefill_s if prefill else stage.decode_s)
            self.free_s[rank] = end_s
            ready_s = end_s + (stage.send_prefill_s if prefill else stage.send_decode_s)
            self.blocks.append(
                Block(
                    rank=rank,
                    phase=phase,
                    micro_batch=micro_batch,
                    step=step,
                    start_s=start_s,
                    end_s=end_s,
                )
            )
        return ready_s
