"""Warm-up: one micro-batch of each phase before the run.

First calls choose kernels and allocate memory: on a CPU, the first prefill of a stage took 10 to
15 ms longer than the second.

Shapes: R rows, T tokens a row, H hidden size.
"""

from __future__ import annotations

import torch

from llmpq.dist.engine.cuda_graphs import MOST_BLOCKS
from llmpq.dist.engine.stage import StageRunner
from llmpq.dist.metrics.stats import synchronize
from llmpq.dist.transport.frames import Row
from llmpq.models import Master
from llmpq.spec.plan import Plan, StageAssignment
from llmpq.spec.precision import Phase

MAX_TOKENS = 4096
"""Most tokens of a prefill to warm up with."""


@torch.inference_mode()
def warm_up(
    plan: Plan, stage: StageAssignment, runner: StageRunner, hidden_size: int, dtype: torch.dtype
) -> None:
    """Run a stage's layers on zeros, at the plan's sizes, in the phases that it computes.

    What it writes to the slots is overwritten or masked later.
    """
    work, sizes = plan.workload, plan.micro_batching
    if runner.layers is None:
        return
    prompt = work.prompt_tokens
    rows = min(sizes.prefill, max(1, MAX_TOKENS // prompt))
    steps = [(range(rows), prompt, 0)] if stage.computes(Phase.PREFILL) else []
    if work.new_tokens > 1 and stage.computes(Phase.DECODE):
        # A graph is captured for the slots of one micro-batch; without graphs one step is enough.
        last = work.batch - sizes.decode if runner.graphs is not None else 0
        blocks = range(0, last + 1, sizes.decode)[:MOST_BLOCKS]  # of more, all share a graph
        steps += [(range(slot, slot + sizes.decode), 1, prompt) for slot in blocks]
    for slots, tokens, first in steps:
        hidden = torch.zeros(len(slots), tokens, hidden_size, dtype=dtype, device=runner.device)
        runner.run(hidden, [Row(slot=slot, first=first, length=first + tokens) for slot in slots])
    synchronize(runner.device)


@torch.inference_mode()
def warm_up_master(plan: Plan, master: Master, runner: StageRunner) -> None:
    """Embed and project as a micro-batch of either phase would."""
    work, sizes = plan.workload, plan.micro_batching
    for rows, tokens in ((sizes.prefill, work.prompt_tokens), (sizes.decode, 1)):
        ids = torch.zeros(rows, min(tokens, MAX_TOKENS), dtype=torch.int64)
        positions = torch.arange(ids.shape[1]).expand(ids.shape)
        hidden = master.embed(ids.to(runner.device), positions)
        master.logits(hidden[:, -1])
    synchronize(runner.device)
