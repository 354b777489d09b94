"""Warm-up: one micro-batch of each phase before the run.

First calls choose kernels and allocate memory: on a CPU, the first prefill of a stage took 10 to
15 ms longer than the second. Layers of the same bits have the same kernels, so one of them is
enough for a prefill on a CPU, and none where prompts run as compiled steps.

Shapes: N tokens of a step, H hidden size.
"""

from __future__ import annotations

import torch

from llmpq.dist.engine.cuda_graphs import DecodeGraphs, DecodeSizes
from llmpq.dist.engine.stage import StageRunner, slot_row
from llmpq.dist.metrics.stats import synchronize
from llmpq.models import Master
from llmpq.spec.plan import Plan, StageAssignment
from llmpq.spec.precision import Phase
from llmpq.spec.runtime_constants import PROMPT_CHUNK_TOKENS

MAX_TOKENS = 4096
"""Most tokens of a prefill to warm up with."""


@torch.inference_mode()
def warm_up(
    plan: Plan,
    stage: StageAssignment,
    runner: StageRunner,
    hidden_size: int,
    dtype: torch.dtype,
    window: int | None = None,
) -> None:
    """Run a stage's layers on zeros, at the plan's sizes, in the phases that it computes.

    On a CPU, prefill runs one layer of each bitwidth, or none where prompts are compiled.

    What it writes to the blocks is overwritten or masked later. ``window`` is the model's largest,
    if layers with windows have blocks of their own.
    """
    work, sizes = plan.workload, plan.micro_batching
    if runner.layers is None:
        return
    prompt = min(work.prompt_tokens, PROMPT_CHUNK_TOKENS)
    rows = min(sizes.prefill, max(1, MAX_TOKENS // prompt))
    one_each = None
    if runner.device.type == "cpu":
        one_each = [i for i, bits in enumerate(stage.bits) if bits not in stage.bits[:i]]
    is_compiled = runner.steps is not None and runner.steps.takes_prompts
    steps = []
    if stage.computes(Phase.PREFILL) and not is_compiled:
        steps.append((rows, 0, prompt, one_each))
    if work.new_tokens > 1 and stage.computes(Phase.DECODE):
        steps.append((sizes.decode, work.prompt_tokens, work.prompt_tokens + 1, None))
    _, max_tokens = plan.slots_of(stage)
    for count, first, length, only in steps:
        tokens = count * (length - first)
        hidden = torch.zeros(1, tokens, hidden_size, dtype=dtype, device=runner.device)
        micro_batch = [
            slot_row(slot, (first, length), max_tokens, window=window) for slot in range(count)
        ]
        runner.run(hidden, micro_batch, only)
    synchronize(runner.device)


def capture_decode_steps(runner: StageRunner, sizes: DecodeSizes, reserve_bytes: int) -> bool:
    """Capture a stage's decode steps as CUDA graphs; return False where it has none.

    Called last, when everything else of the process has its memory.

    Args:
        runner: of the stage.
        sizes: of its decode steps.
        reserve_bytes: memory that prompts and uncaptured steps need.
    """
    if not isinstance(runner.steps, DecodeGraphs):
        return False
    runner.steps.capture(sizes.shapes(), reserve_bytes=reserve_bytes)
    synchronize(runner.device)
    return True


@torch.inference_mode()
def warm_up_master(plan: Plan, master: Master, runner: StageRunner) -> None:
    """Embed and project as a micro-batch of either phase would."""
    work, sizes = plan.workload, plan.micro_batching
    for rows, tokens in ((sizes.prefill, work.prompt_tokens), (sizes.decode, 1)):
        count = min(tokens, MAX_TOKENS)
        ids = torch.zeros(1, rows * count, dtype=torch.int64, device=runner.device)
        hidden = master.embed(ids, torch.arange(count).repeat(rows)[None])
        master.logits(hidden[0, :rows])
    synchronize(runner.device)
