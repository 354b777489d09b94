"""Measure the memory of a plan's stages: run it once, at its full size, and read the peaks."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

from llmpq.dist import Job, Prompt, run_job
from llmpq.dist.io.prompts import write_prompts
from llmpq.dist.metrics.measurement import StageStats
from llmpq.dist.metrics.progress import RunProgress
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.plan import Plan, write_plan


def measure_memory(
    plan: Plan,
    model_dir: Path,
    *,
    lengths: Sequence[int] | None = None,
    seed: int = 0,
    step_timeout_s: float = 60.0,
    progress: RunProgress | None = None,
) -> tuple[StageStats, ...]:
    """Run ``plan`` with random prompts that fill it, and return the statistics of each stage.

    All ranks run on this host. Without ``lengths`` of prompts there is one full prompt per slot.

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
        write_prompts(job.prompts, _prompts(plan, lengths, vocab_size, seed))
        measurement = run_job(job, progress=progress, max_restarts=0)
    assert measurement is not None  # rank 0 runs on this host
    return measurement.stages


def _prompts(plan: Plan, lengths: Sequence[int] | None, vocab_size: int, seed: int) -> list[Prompt]:
    chance = random.Random(seed)
    work = plan.workload
    return [
        Prompt(
            id=number,
            where=f"prompt {number}",
            token_ids=tuple(chance.randrange(vocab_size) for _ in range(tokens)),
            max_new_tokens=work.new_tokens,
            ignore_eos=True,
        )
        for number, tokens in enumerate(lengths or [work.prompt_tokens] * work.batch)
    ]
