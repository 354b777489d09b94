"""Measure the memory of a plan's stages: run it once, at its full size, and read what was held.

What is measured is what serves: the ranks are the processes that ``llmpq-dist`` starts, loaded from
the same files and fed as many prompts of the full length as the plan has slots, so that every slot
is written to its end. It refuses to predict; a command puts the forecast beside it.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from llmpq.dist import Job, Prompt, run_job
from llmpq.dist.io.prompts import write_prompts
from llmpq.dist.metrics.measurement import StageStats
from llmpq.dist.metrics.progress import Progress
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.plan import Plan, write_plan


def measure_memory(
    plan: Plan,
    model_dir: Path,
    *,
    seed: int = 0,
    step_timeout_s: float = 60.0,
    progress: Progress | None = None,
) -> tuple[StageStats, ...]:
    """Run ``plan`` with random prompts that fill it, and return what each stage held.

    Args:
        plan: the strategy; all of its ranks run on this host.
        model_dir: where the weights are.
        seed: of the prompts.
        step_timeout_s: how long a rank may give no sign of life.
        progress: takes events.

    Returns:
        The statistics of every stage, in order of rank.

    Raises:
        LlmpqError: as ``llmpq.dist.run_job``.
    """
    vocab_size = load_model_dir(model_dir).vocab_size
    with tempfile.TemporaryDirectory(prefix="llmpq-") as name:
        folder = Path(name)
        job = Job(
            strategy=folder / "strategy.json",
            model_dir=model_dir,
            prompts=folder / "prompts.jsonl",
            output=folder / "results.jsonl",
            step_timeout_s=step_timeout_s,
        )
        write_plan(job.strategy, plan)
        write_prompts(job.prompts, _full_prompts(plan, vocab_size, seed))
        measurement = run_job(job, progress=progress)
    assert measurement is not None  # rank 0 runs on this host
    return measurement.stages


def _full_prompts(plan: Plan, vocab_size: int, seed: int) -> list[Prompt]:
    """Return one prompt a slot, as long as the plan allows, that no end token cuts short."""
    chance = random.Random(seed)
    return [
        Prompt(
            id=number,
            where=f"prompt {number}",
            token_ids=tuple(
                chance.randrange(vocab_size) for _ in range(plan.workload.prompt_tokens)
            ),
            max_new_tokens=plan.workload.new_tokens,
            ignore_eos=True,
        )
        for number in range(plan.workload.batch)
    ]
