"""Running a plan: one process for each stage, prompts in, tokens out.

Importing this package does not load torch; the workers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmpq.dist.io.job import Job, Rendezvous, check_model, schedule_of
from llmpq.dist.io.prompts import (
    Prompt,
    RequestLimits,
    request_limits,
    sort_prompts,
    sort_requests,
)
from llmpq.dist.io.results import Result, finished_ids
from llmpq.dist.io.sampling_params import GREEDY, SamplingParams
from llmpq.dist.launch.ranks import HostMonitor, Hosts, Ranks
from llmpq.dist.launch.signals import StopRequest
from llmpq.dist.metrics.measurement import Measurement
from llmpq.dist.metrics.progress import RunProgress
from llmpq.errors import SpecError
from llmpq.options.declare import read_keywords, with_keywords
from llmpq.options.run import FaultOptions
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.model_files.config import absolute_model_path
from llmpq.spec.plan import Plan, read_plan

__all__ = [
    "Hosts",
    "Job",
    "Prompt",
    "Rendezvous",
    "Result",
    "SamplingParams",
    "check_job",
    "generate_offline",
    "model_dir_of",
    "run_job",
]


def generate_offline(
    plan: Plan,
    prompts: Sequence[Prompt],
    *,
    model_dir: str | Path | None = None,
    sampling: SamplingParams = GREEDY,
    progress: RunProgress | None = None,
    **options: Any,
) -> list[Result]:
    """Answer prompts with the ranks of ``plan``, loaded for this call alone.

    Args:
        plan: the strategy.
        prompts: any number; ids must differ.
        model_dir: where the weights are; the plan's own directory by default.
        sampling: how tokens are chosen where a prompt does not say; greedy by default.
        progress: receives events.
        options: those of a ``Session``.

    Returns:
        The results in the order of the prompts.

    Raises:
        LlmpqError: ``SpecError`` for bad prompts or files, ``CapacityError`` when memory ran out,
            ``StageError`` when a rank died, hung or failed.
    """
    # Starting ranks takes no asyncio, which they would load too.
    from llmpq.dist.async_engine import Session  # noqa: PLC0415

    folder = model_dir_of(plan, model_dir)
    with Session(plan, folder, progress=progress, **options) as session:
        return session.generate(
            [replace(item, sampling_params=item.sampling_params or sampling) for item in prompts]
        )


@with_keywords(FaultOptions)
def run_job(
    job: Job,
    *,
    hosts: Hosts | None = None,
    progress: RunProgress | None = None,
    stop: StopRequest | None = None,
    monitor: HostMonitor | None = None,
    **options: Any,
) -> Measurement | None:
    """Start this host's ranks, wait for their end, return what the master measured.

    Args:
        job: what to run; its rendezvous is completed here.
        hosts: this host's place; by default all ranks run here.
        progress: receives events.
        stop: asks the run to end early.
        monitor: watches the other hosts, and has the plan without those that are lost.
        options: those of ``FaultOptions``.

    Returns:
        The measurement, ``None`` on a host without the master and from the doctor.

    Raises:
        LlmpqError: as for :func:`generate_offline`, and ``StoppedError`` when asked to end early.
    """
    plan = check_job(job)
    (faults,) = read_keywords(options, FaultOptions)
    with Ranks(plan, faults, hosts=hosts, progress=progress, stop=stop, monitor=monitor) as ranks:
        return ranks.run(job)


def check_job(job: Job) -> Plan:
    """Raise an error for what no rank could run; what needs a tokenizer is left to the ranks."""
    plan = read_plan(job.strategy)
    model = load_model_dir(job.model_dir)
    check_model(plan, job.model_dir, model)
    schedule_of(plan, job.schedule)
    _check_prompts(job, request_limits(plan, model, (), job.sampling))
    finished_ids(job.output, resume=job.resume)
    return plan


def _check_prompts(job: Job, limits: RequestLimits) -> None:
    """Refuse a file without a prompt that could be served, or with one that cannot be."""
    prompts, refused = sort_prompts(job.prompts)
    as_tokens = [prompt for prompt in prompts if prompt.token_ids is not None]
    unfit = sort_requests(as_tokens, limits, None)[1]
    is_none_left = len(unfit) == len(prompts)
    if (refused or unfit) and (is_none_left or not job.skips_bad_prompts):
        raise (refused or unfit)[0]


def model_dir_of(plan: Plan, given: str | Path | None) -> Path:
    """Return where the weights are: the directory given, else the plan's own."""
    if given is None and plan.model.source is None:
        raise SpecError(
            f"plan: model {plan.model.name} names no directory of weights, expected --model DIR"
        )
    path = absolute_model_path(given if given is not None else str(plan.model.source))
    if not path.exists():
        where = "the plan's model" if given is None else "--model"
        raise SpecError(f"{where}: {path}: no such directory, expected a model with its weights")
    return path
