"""What one rank does: the task of a job, from its plan to the master's measurement."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from llmpq.dist import block_unused_imports as lean  # noqa: F401  before what imports transformers
from llmpq.dist.engine.batch_run import FinishedAnswer, result_of
from llmpq.dist.engine.master_tasks import run_teacher_forcing, serve
from llmpq.dist.io.control_channel import ControlChannel
from llmpq.dist.io.job import START_TIMEOUT_S, Job
from llmpq.dist.io.model_files import eos_token_ids, load_tokenizer
from llmpq.dist.io.prompts import (
    Request,
    RequestLimits,
    Tokenizer,
    make_request,
    read_prompts,
    request_limits,
    sort_prompts,
    sort_requests,
)
from llmpq.dist.io.results import ResultWriter
from llmpq.dist.launch.doctor import examine, gather, report, time_link
from llmpq.dist.launch.draft_runner import has_draft_rank, reads_states, run_draft_model
from llmpq.dist.launch.process_environment import tune_malloc_for_loading
from llmpq.dist.launch.rank import (
    RankContext,
    checked_config,
    engine_limits_of,
    frame_limits,
    master_rank,
    max_context_of,
    ring_errors,
    run_master,
    run_stage,
    torch_device,
)
from llmpq.dist.metrics.measurement import Measurement, StartLog
from llmpq.dist.metrics.progress import RunProgress
from llmpq.dist.metrics.stats import Recorder
from llmpq.dist.transport.channels import RankChannels
from llmpq.dist.transport.endpoint import Endpoint
from llmpq.dist.transport.errors import stage_name
from llmpq.dist.transport.rendezvous import RankIdentity, connect
from llmpq.dist.transport.topology import topology_of
from llmpq.dist.transport.torch_links import CPU
from llmpq.errors import SpecError
from llmpq.spec.fields import dump_json, write_text
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.model_files.tokenizer import missing_tokenizer
from llmpq.spec.plan import Plan, read_plan


def run_rank(
    job: Job, rank: int, progress: RunProgress, start: StartLog | None = None
) -> Measurement | None:
    """Run one rank of a job; return the master's measurement, ``None`` on other ranks.

    ``start`` has the steps so far of the rank's start.
    """
    start = start or StartLog(time.perf_counter())
    tune_malloc_for_loading()
    plan = read_plan(job.strategy)
    if rank == plan.draft_rank:
        if has_draft_rank(job, plan):
            context = _context(job, plan, rank, progress, start)
            with ring_errors(context):
                assert context.communicator is not None
                device = torch_device(plan, rank)
                run_draft_model(job, plan, device, context.communicator, progress)
        return None
    if job.task == "doctor":
        _examine(job, plan, rank)
        return None
    if rank > 0:
        run_stage(_context(job, plan, rank, progress, start))
        return None
    if job.task == "hidden":
        return _write_hidden(job, plan, progress, start)
    if job.task == "serve":
        return _serve(job, plan, progress, start)
    if job.task == "online":
        return _serve_online(job, plan, progress, start)
    with ResultWriter(job.output, resume=job.resume) as writer:
        tokenizer = load_tokenizer(job.model_dir)
        requests, refused = _requests(job, plan, tokenizer)
        requests = [request for request in requests if request.id not in writer.done]
        start.mark("prompts")

        def finish(answer: FinishedAnswer) -> None:
            writer.write(result_of(answer, tokenizer))

        context = _context(job, plan, rank, progress, start)
        measurement = run_master(context, requests, finish)
        measurement = replace(measurement, refused=tuple(map(str, refused)))
    if job.trace is not None:
        names = [context.name] if context.communicator is None else context.communicator.names
        write_text(job.trace, json.dumps(context.recorder.to_json(names)))
    return measurement


def _serve(job: Job, plan: Plan, progress: RunProgress, start: StartLog) -> Measurement:
    """Answer batches of requests from the socket of the session that started this process."""
    limits = _limits(job, plan)
    with Endpoint(path=str(job.prompts)).connect(START_TIMEOUT_S) as sock:
        sock.settimeout(None)
        tokenizer = load_tokenizer(job.model_dir)
        return serve(
            _context(job, plan, 0, progress, start), ControlChannel(sock), tokenizer, limits
        )


def _limits(job: Job, plan: Plan) -> RequestLimits:
    eos = eos_token_ids(job.model_dir, checked_config(plan, job.model_dir))
    limits = request_limits(plan, load_model_dir(job.model_dir), eos, job.sampling)
    return replace(limits, missing_tokenizer=missing_tokenizer(job.model_dir))


def _serve_online(job: Job, plan: Plan, progress: RunProgress, start: StartLog) -> Measurement:
    """Answer requests as they arrive on the socket of the process that started this one."""
    with Endpoint(path=str(job.prompts)).connect(START_TIMEOUT_S) as sock:
        sock.settimeout(None)
        with master_rank(_context(job, plan, 0, progress, start)) as master:
            master.serve_online(ControlChannel(sock))
            return master.finish()


def _examine(job: Job, plan: Plan, rank: int) -> None:
    """Look at this rank's host and links; rank 0 writes the findings of all ranks."""
    facts = examine(plan, rank, job.model_dir) | {"clock_offset_s": 0.0}
    everyone: list[dict[str, Any]] | None = [facts]
    if len(plan.stages) > 1:
        identity = _identity(job, plan, rank)
        ring = connect(identity, job.rendezvous, job.transport)
        with contextlib.closing(ring):
            link = time_link(ring, identity.limits)
            facts |= {"clock_offset_s": ring.clock_offset_s, "link": link}
            everyone = gather(ring, facts)
    if everyone is not None:
        write_text(job.output, dump_json(report(plan, everyone)))


def _write_hidden(job: Job, plan: Plan, progress: RunProgress, start: StartLog) -> Measurement:
    """Write the states after the last layer, one tensor for each micro-batch, named by number."""
    limits = request_limits(plan, load_model_dir(job.model_dir), ())
    prompts = [make_request(prompt, limits, None) for prompt in read_prompts(job.prompts)]
    states: dict[str, Tensor] = {}

    def keep(number: int, hidden: Tensor) -> None:
        states[str(number)] = hidden.cpu().contiguous()

    context = _context(job, plan, 0, progress, start)
    measurement = run_teacher_forcing(context, [item.prompt_token_ids for item in prompts], keep)
    save_file(states, job.output)
    return measurement


def _requests(
    job: Job, plan: Plan, tokenizer: Tokenizer | None
) -> tuple[list[Request], list[SpecError]]:
    """Return what can be answered; bad prompts are refused before any weight is read."""
    prompts, refused = sort_prompts(job.prompts)
    requests, unfit = sort_requests(prompts, _limits(job, plan), tokenizer)
    refused += unfit
    if refused and not (job.skips_bad_prompts and requests):
        raise refused[0]
    return requests, refused


def _context(
    job: Job, plan: Plan, rank: int, progress: RunProgress, start: StartLog
) -> RankContext:
    checked_config(plan, job.model_dir)
    channels: RankChannels | None = None
    has_drafts = has_draft_rank(job, plan)
    if len(plan.stages) > 1 or has_drafts:
        topology = topology_of(plan, has_drafts=has_drafts)
        channels = connect(_identity(job, plan, rank), job.rendezvous, job.transport, topology)
        start.mark("connect")
    offset_s = 0.0 if channels is None else channels.clock_offset_s
    return RankContext(
        job=job,
        plan=plan,
        rank=rank,
        progress=progress,
        channels=channels,
        recorder=Recorder(rank, is_on=job.trace is not None, clock_offset_s=offset_s, start=start),
    )


def _identity(job: Job, plan: Plan, rank: int) -> RankIdentity:
    return RankIdentity(
        rank=rank,
        world_size=len(plan.stages) + has_draft_rank(job, plan),
        name=stage_name(plan, rank, socket.gethostname()),
        limits=frame_limits(
            plan,
            job.model_dir,
            engine_limits_of(job, plan),
            max_context_of(job, plan),
            has_drafts=job.engine.speculative_config is not None,
            returns_all=reads_states(job),
        ),
        timeout_s=job.step_timeout_s,
        device=_device(plan, rank),
    )


def _device(plan: Plan, rank: int) -> torch.device:
    """Return the device of a rank; the CPU for a missing one, which fails after connecting."""
    try:
        return torch_device(plan, rank)
    except SpecError:
        return CPU
