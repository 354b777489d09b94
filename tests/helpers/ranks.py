"""Plans for tiny models, and a run of all ranks of one as threads of this process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from helpers.clocks import PATIENCE_S
from helpers.in_process_ring import in_process_ring
from helpers.links import open_links
from helpers.scripted_channel import Script

from llmpq.batching.speculation import SpeculativeConfig
from llmpq.dist.engine.batch_run import FinishedAnswer
from llmpq.dist.io.job import Job
from llmpq.dist.io.prompts import Request
from llmpq.dist.io.results import FinishReason
from llmpq.dist.launch.draft_runner import run_draft_model
from llmpq.dist.launch.rank import (
    RankContext,
    frame_limits,
    master_rank,
    ring_errors,
    run_master,
    run_stage,
)
from llmpq.dist.metrics.measurement import Measurement
from llmpq.dist.metrics.progress import RunProgress, SilentProgress
from llmpq.dist.transport.channels import RankChannels, make_rank_channels
from llmpq.dist.transport.communicator import Communicator
from llmpq.dist.transport.frames import FrameLimits
from llmpq.dist.transport.topology import topology_of
from llmpq.options.engine import EngineOptions
from llmpq.options.limits import engine_limits, max_model_len
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.plan import (
    MemoryParts,
    MicroBatching,
    ModelRef,
    Plan,
    PlanEstimate,
    Provenance,
    Schedule,
    Search,
    StageAssignment,
    StageEstimate,
)
from llmpq.spec.precision import Phase
from llmpq.spec.workload import Workload

Answers = dict[str | int, tuple[tuple[int, ...], FinishReason]]


def make_plan(
    cuts: Sequence[int],
    *,
    bits: Sequence[int] | None = None,
    prefill: int = 1,
    decode: int = 1,
    batch: int = 4,
    prompt_tokens: int = 16,
    new_tokens: int = 8,
    source: Path | None = None,
    cluster: Cluster | None = None,
) -> Plan:
    """A plan of CPU stages ``[cuts[i], cuts[i + 1])``; its estimates are ones."""
    widths = list(bits or [16] * cuts[-1])
    num_stages = len(cuts) - 1
    memory = MemoryParts(weights=1, kv=1, temporary=1, master=1, runtime=1)
    estimate = StageEstimate(
        prefill_s=1.0,
        decode_s=1.0,
        send_prefill_s=1.0,
        send_decode_s=1.0,
        memory=memory,
        capacity_bytes=5,
    )
    return Plan(
        model=ModelRef(
            name="tiny", source=None if source is None else str(source), num_layers=cuts[-1]
        ),
        cluster=cluster or cpu_cluster(num_stages),
        workload=Workload(batch=batch, prompt_tokens=prompt_tokens, new_tokens=new_tokens),
        dtype="float32",
        kv_bits=32,
        micro_batching=MicroBatching(prefill=prefill, decode=decode),
        stages=tuple(
            StageAssignment(
                rank=rank,
                device=rank,
                first_layer=first,
                end_layer=end,
                bits=tuple(widths[first:end]),
            )
            for rank, (first, end) in enumerate(itertools.pairwise(cuts))
        ),
        dropped_devices=(),
        estimate=PlanEstimate(
            latency_s=1.0, quality=0.0, objective_s=1.0, stages=(estimate,) * num_stages
        ),
        search=Search(method="by hand"),
        provenance=Provenance(command="test", version="0"),
    )


def with_weights_on_disk(plan: Plan, layers: Collection[int] | None = None) -> Plan:
    """The plan with the weights of some layers, by default all, on disk."""
    return replace(
        plan,
        stages=tuple(
            replace(
                stage,
                weights=tuple(
                    "disk" if layers is None or layer in layers else "resident"
                    for layer in range(stage.first_layer, stage.end_layer)
                ),
            )
            for stage in plan.stages
        ),
    )


def make_split_plan(
    decode_cuts: Sequence[int],
    prefill_cuts: Sequence[int],
    *,
    encode_batch: int = 2,
    kv_bits: int = 32,
    **values: Any,
) -> Plan:
    """A plan for WAA: stages that decode, the master's first, then stages that prefill."""
    plan = make_plan(decode_cuts, **values)
    widths = plan.bits
    number = len(decode_cuts) - 1 + len(prefill_cuts) - 1
    phases = [(Phase.DECODE, *cut) for cut in itertools.pairwise(decode_cuts)] + [
        (Phase.PREFILL, *cut) for cut in itertools.pairwise(prefill_cuts)
    ]
    return replace(
        plan,
        cluster=values.get("cluster") or cpu_cluster(number),
        kv_bits=kv_bits,
        stages=tuple(
            StageAssignment(
                rank=rank,
                device=rank,
                first_layer=first,
                end_layer=end,
                bits=widths[first:end],
                phase=phase,
            )
            for rank, (phase, first, end) in enumerate(phases)
        ),
        estimate=replace(plan.estimate, stages=plan.estimate.stages[:1] * number),
        schedule=Schedule(
            policy="waa", encode_batch=encode_batch, decode_batch=plan.workload.batch
        ),
    )


def cpu_cluster(count: int) -> Cluster:
    """So many one-thread CPU workers on one node."""
    group = DeviceGroup(type="cpu", count=count, threads=1)
    return Cluster(name="here", nodes=(Node(name="here", devices=(group,)),))


def connected_channels(
    plan: Plan,
    limits: FrameLimits,
    timeout_s: float = PATIENCE_S,
    transport: str = "sockets",
) -> list[RankChannels]:
    """The channels of all ranks, connected over a transport."""
    topology = topology_of(plan, has_drafts=True)
    links = open_links(topology, len(plan.rank_devices), transport)
    names = [f"stage {rank} (rank {rank})" for rank in range(len(links))]
    return [
        make_rank_channels(rank, names, limits, topology, own, timeout_s)
        for rank, own in enumerate(links)
    ]


def rank_contexts(
    plan: Plan,
    model_dir: Path,
    ring: Sequence[Communicator] = (),
    progress: RunProgress | None = None,
    **options: Any,
) -> list[RankContext]:
    """The contexts of all ranks, connected by a ring; ``options`` are those of the job."""
    paths = {name: model_dir / name for name in ("strategy", "prompts", "output")}
    channels = [RankChannels(communicator=one, transport="threads") for one in ring]
    return [
        RankContext(
            job=Job(model_dir=model_dir, **paths, **options),
            plan=plan,
            rank=rank,
            channels=channels[rank] if channels else None,
            progress=progress or SilentProgress(),
        )
        for rank in range(len(plan.rank_devices))
    ]


def run_draft_rank(context: RankContext) -> None:
    """Run the rank of a draft model."""
    with ring_errors(context):
        assert context.communicator is not None
        device = torch.device("cpu")
        run_draft_model(context.job, context.plan, device, context.communicator, context.progress)


def serve_script(
    plan: Plan,
    model_dir: Path,
    script: Script,
    engine: EngineOptions,
    transport: str = "threads",
    **options: Any,
) -> None:
    """Serve what a script adds: the stages of a plan in threads, the master in this one."""
    longest = max_model_len(plan, engine, None)
    limits = frame_limits(plan, model_dir, engine_limits(plan, engine), longest)
    ring: Sequence[Communicator] = []
    if transport != "threads":
        made = connected_channels(plan, limits, transport=transport)
        ring = [one.communicator for one in made if one.communicator is not None]
    elif len(plan.stages) > 1:
        ring = in_process_ring(len(plan.stages), limits)
    contexts = rank_contexts(plan, model_dir, ring, task="online", engine=engine, **options)
    threads = [threading.Thread(target=run_stage, args=(one,)) for one in contexts[1:]]
    for thread in threads:
        thread.start()
    try:
        with master_rank(contexts[0]) as master:
            master.serve_online(script)
            master.finish()
    finally:
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def run_threads(
    plan: Plan,
    model_dir: Path,
    requests: Sequence[Request],
    *,
    wrap: Callable[[Communicator], Communicator] = lambda communicator: communicator,
    progress: RunProgress | None = None,
    speculative: SpeculativeConfig | None = None,
    run_drafts: Callable[[RankContext], None] = run_draft_rank,
    transport: str = "threads",
    **options: Any,
) -> tuple[Answers, Measurement]:
    """Run every rank of ``plan`` in a thread; the master in this one.

    ``options`` are those of the job.

    ``transport`` is of :func:`open_links`; queues of this process connect a plan without other
    links than one ring by default, sockets every other one.
    """
    answers: Answers = {}

    def finish(answer: FinishedAnswer) -> None:
        assert answer.request.id not in answers
        answers[answer.request.id] = (answer.token_ids, answer.reason)

    limits = frame_limits(plan, model_dir, has_drafts=speculative is not None)
    engine = EngineOptions(speculative_config=speculative)
    if transport == "threads" and (plan.is_split or plan.draft_rank is not None):
        transport = "sockets"
    if transport != "threads":
        channels = [
            replace(one, communicator=one.communicator and wrap(one.communicator))
            for one in connected_channels(plan, limits, transport=transport)
        ]
        contexts = rank_contexts(plan, model_dir, [], progress, engine=engine, **options)
        contexts = [
            replace(context, channels=own) for context, own in zip(contexts, channels, strict=True)
        ]
    else:
        ring = in_process_ring(len(plan.stages), limits) if len(plan.stages) > 1 else []
        wrapped = [wrap(one) for one in ring]
        contexts = rank_contexts(plan, model_dir, wrapped, progress, engine=engine, **options)
    failures: list[BaseException] = []

    def stage(context: RankContext) -> None:
        try:
            (run_drafts if context.rank == plan.draft_rank else run_stage)(context)
        except Exception as error:  # reported by the master's own error, or below
            failures.append(error)

    threads = [threading.Thread(target=stage, args=(context,)) for context in contexts[1:]]
    for thread in threads:
        thread.start()
    try:
        measurement = run_master(contexts[0], requests, finish)
    finally:
        for thread in threads:
            thread.join(timeout=PATIENCE_S)
            assert not thread.is_alive()
    assert not failures
    return answers, measurement
