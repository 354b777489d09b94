"""One rank of a run, as master or as stage: in a process or, in tests, in a thread."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from llmpq.batching import PipelineDepth, PipelineShape, PolicyScheduler, make_policy
from llmpq.batching.blocks import NOTHING_KEPT, blocks_of
from llmpq.batching.engine_step import EngineLimits
from llmpq.batching.length import LearnedPredictor
from llmpq.batching.queue_order import queue_order
from llmpq.batching.speculation import MAX_STEP_TOKENS
from llmpq.dist.engine.batch_run import (
    BatchRun,
    OnFinish,
    OnTokens,
    ShouldAbort,
    predictor_of,
)
from llmpq.dist.engine.compiled_steps import step_runner_of
from llmpq.dist.engine.cuda_graphs import DecodeSizes
from llmpq.dist.engine.drafters import Drafter, RemoteDraftModel
from llmpq.dist.engine.executor import (
    PipelineExecutor,
    StageRunner,
    StageWorker,
    capture_decode_steps,
    warm_up,
    warm_up_master,
)
from llmpq.dist.engine.online_run import EngineChannel, OnlineRun
from llmpq.dist.io.control_channel import ModelLimits
from llmpq.dist.io.job import Job, check_plan, schedule_of
from llmpq.dist.io.model_files import eos_token_ids
from llmpq.dist.io.prompts import Request
from llmpq.dist.io.structured_outputs import GrammarCompiler
from llmpq.dist.kv.cache import KVCache, token_bytes
from llmpq.dist.kv.offload import BlockFiles, OffloadedKV
from llmpq.dist.kv.transfer import kv_connector
from llmpq.dist.launch.draft_runner import (
    DTYPES,
    held_bytes,
    load_draft_model,
    load_mtp_drafter,
    reads_states,
    unplanned_mtp_bytes,
    weight_cache_of,
)
from llmpq.dist.launch.process_environment import host_cores, tune_malloc_for_serving
from llmpq.dist.launch.signals import DrainFlag, is_ending
from llmpq.dist.metrics.measurement import Measurement
from llmpq.dist.metrics.progress import Event, RunProgress
from llmpq.dist.metrics.report import drift_monitor
from llmpq.dist.metrics.stats import Recorder, RecordingCommunicator, StageClock
from llmpq.dist.transport.channels import RankChannels
from llmpq.dist.transport.communicator import (
    Communicator,
    as_llmpq_error,
    error_frame,
    error_from_frame,
    shut_down,
    wait_until_ready,
)
from llmpq.dist.transport.errors import stage_name
from llmpq.dist.transport.frames import FrameLimits
from llmpq.errors import CapacityError, SpecError, StageError
from llmpq.kernels.base import open_device
from llmpq.kernels.cpu.experts import HostPool
from llmpq.kernels.cpu.step import UnsupportedStepError
from llmpq.logging import get_logger
from llmpq.models import Master, MtpCheckpoint, kv_shapes, load_config
from llmpq.models.adapter import has_states, kv_sources, largest_window
from llmpq.models.master import message_features
from llmpq.models.stage import length_scaling
from llmpq.options.engine import EngineOptions
from llmpq.options.limits import (
    engine_limits,
    max_model_len,
    own_window,
    policy_limits,
    window_blocks,
)
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.loading.master import load_master
from llmpq.spec.catalog import device as device_spec
from llmpq.spec.devices.figures import DeviceKind
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.model_files.config import config_bytes
from llmpq.spec.plan import Plan, StageAssignment, draft_bytes, plan_text
from llmpq.spec.precision import Phase
from llmpq.spec.runtime_constants import KV_BLOCK_SIZE, state_slots
from llmpq.units import format_bytes

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """One rank of a run: ``channels`` are ``None`` when there is no other rank."""

    job: Job
    plan: Plan
    rank: int
    progress: RunProgress
    channels: RankChannels | None = None
    recorder: Recorder = field(default_factory=lambda: Recorder(0, is_on=False))

    @property
    def communicator(self) -> Communicator | None:
        """The ring, ``None`` when there is only one stage."""
        return None if self.channels is None else self.channels.communicator

    @property
    def draft_link(self) -> Communicator | None:
        """On the master, the ring with the rank of a draft model; ``None`` without one."""
        return None if self.channels is None else self.channels.draft

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states of a sequence, in all layers."""
        return load_model_dir(self.job.model_dir).state_bytes()

    @property
    def name(self) -> str:
        """Name of this rank in messages."""
        if self.communicator is not None:
            return self.communicator.names[self.rank]
        return stage_name(self.plan, self.rank)


def checked_config(plan: Plan, model_dir: Path) -> PreTrainedConfig:
    """Read the model's configuration; ``SpecError`` if the plan is for another model."""
    config = load_config(model_dir)
    check_plan(plan, model_dir, config.num_hidden_layers)
    if plan.is_split and any(source is not None for source in kv_sources(config)):
        raise SpecError(
            f"{model_dir}: layers read keys and values of earlier layers, which stages that only "
            "prefill do not send to others; expected a plan without --policy waa"
        )
    return config


def frame_limits(
    plan: Plan,
    model_dir: Path,
    engine: EngineLimits | None = None,
    max_context: int | None = None,
    *,
    has_drafts: bool = False,
    returns_all: bool = False,
) -> FrameLimits:
    """Return the limits of a run's frames; equal on all ranks of equal plans and models.

    ``engine`` are the limits of packed steps, ``None`` where there are none; ``max_context`` is the
    longest sequence, by default the longest that the plan holds memory for; ``has_drafts``: decode
    micro-batches have draft tokens; ``returns_all``: the last stage returns all tokens.
    """
    config = checked_config(plan, model_dir)
    digest = hashlib.sha256(plan_text(plan).encode())
    digest.update(config_bytes(model_dir))
    # Options that every host is given by itself.
    digest.update(repr((engine, max_context, has_drafts, returns_all)).encode())
    dtype = DTYPES[plan.dtype]
    shapes = kv_shapes(config, 0, plan.model.num_layers) if plan.is_split else ()
    cached = DTYPES[plan.dtype_of(plan.stages[0])]  # stages that send keys and values have one
    kv_bits = plan.kv_bits_of(plan.stages[0])
    switch = length_scaling(config).switches_after or 0
    longest = max_context or plan.longest_sequence
    recomputed_tokens = switch + 1 if 0 < switch < longest else 0
    if has_drafts and has_states(config):  # accepted ones are computed again
        recomputed_tokens = max(recomputed_tokens, MAX_STEP_TOKENS)
    return FrameLimits(
        digest=digest.digest()[:8],
        num_blocks=max(
            plan.workload.batch * blocks_of(plan.workload.max_context_tokens),
            0 if engine is None else engine.num_blocks,
        ),
        max_context=longest,
        prefill_rows=plan.micro_batching.prefill,
        prefill_tokens=plan.workload.max_prompt_tokens,
        decode_rows=max(plan.micro_batching.decode, MAX_STEP_TOKENS if has_drafts else 0),
        hidden_size=message_features(config),
        dtype=dtype,
        other_dtypes=tuple(DTYPES[name] for name in plan.dtypes if name != plan.dtype),
        # A row has at least one token.
        mixed_rows=0 if engine is None else engine.token_budget,
        mixed_tokens=0 if engine is None else engine.token_budget,
        recomputed_tokens=recomputed_tokens,
        kv_token_bytes=tuple(token_bytes(shape, cached, kv_bits) for shape in shapes),
        num_window_blocks=window_blocks_of(plan, config) or 0,
    )


def window_of(plan: Plan, config: PreTrainedConfig) -> int | None:
    """Return the window of layers with blocks of their own; see ``own_window``."""
    return own_window(plan, largest_window(config))


def window_blocks_of(plan: Plan, config: PreTrainedConfig) -> int | None:
    """Return the blocks of layers with windows, ``None`` where all layers have the same."""
    return window_blocks(plan, largest_window(config))


def limits_of_model(
    plan: Plan, options: EngineOptions, config: PreTrainedConfig, state_bytes: int
) -> EngineLimits:
    """Return the limits of an engine for a model's rotary angles, windows and states.

    Args:
        plan: the strategy.
        options: of the engine.
        config: of the model.
        state_bytes: of the recurrent states of a sequence, in all layers.
    """
    return engine_limits(
        plan,
        options,
        window_tokens=largest_window(config),
        scaling=length_scaling(config),
        state_bytes=state_bytes,
    )


def policy_limits_of_model(
    plan: Plan, options: EngineOptions, config: PreTrainedConfig, state_bytes: int
) -> EngineLimits:
    """Return the same for an engine whose steps a batching policy decides."""
    return policy_limits(
        plan,
        options,
        window_tokens=largest_window(config),
        scaling=length_scaling(config),
        state_bytes=state_bytes,
    )


def engine_limits_of(job: Job, plan: Plan) -> EngineLimits | None:
    """Return the limits of packed steps, ``None`` for a run without them."""
    return engine_limits(plan, job.engine) if job.task == "online" else None


def max_context_of(job: Job, plan: Plan) -> int:
    """Return the tokens of the longest sequence of a run."""
    if job.task != "online":
        return plan.longest_sequence
    return max_model_len(plan, job.engine, load_model_dir(job.model_dir).max_positions)


def decode_sizes(job: Job, plan: Plan) -> DecodeSizes:
    """Return the sizes of a run's decode steps."""
    limits = engine_limits_of(job, plan)
    if limits is None:
        work = plan.workload
        return DecodeSizes(rows=plan.micro_batching.decode, most_tokens=work.max_context_tokens)
    rows = min(limits.max_sequences, limits.token_budget)
    return DecodeSizes(rows=rows, most_tokens=max_context_of(job, plan))


def torch_device(plan: Plan, rank: int) -> torch.device:
    """Return the device of a rank: the CPU, or its node's n-th accelerator of its kind.

    An accelerator of CUDA or XPU becomes this thread's current device, on which Triton launches.

    Raises:
        SpecError: the plan asks for an accelerator this host does not have.
    """
    own, devices = plan.rank_devices[rank], plan.cluster.devices
    kind = device_spec(devices[own].type, plan.cluster).kind
    if kind == "cpu":
        return torch.device("cpu")
    index = sum(
        other.node == devices[own].node and device_spec(other.type, plan.cluster).kind == kind
        for other in devices[:own]
    )
    here = accelerators(kind)
    if index >= here:
        raise SpecError(
            f"{stage_name(plan, rank)}: found {here} {kind.upper()} devices on this host, "
            f"expected at least {index + 1}"
        )
    return open_device(torch.device(kind, index))


def check_free_memory(context: RankContext, device: torch.device, blocks: int) -> None:
    """Raise before anything is allocated if a GPU has less free memory than the plan needs.

    Args:
        context: of the rank.
        device: of the rank.
        blocks: KV blocks of the stage.

    Raises:
        CapacityError: says what is needed, and what is free.
    """
    plan, rank = context.plan, context.rank
    if device.type != "cuda":
        return
    stage, needed = plan.stages[rank], plan.estimate.stages[rank].memory
    slots, max_tokens = plan.slots_of(stage)
    parts = {
        # An estimate made without them counts experts on the host as if they were here.
        "weights": 0 if stage.host_threads and needed.host is None else needed.weights,
        "keys and values": needed.kv * blocks // max(1, slots * blocks_of(max_tokens)),
        "states beyond the plan": more_state_bytes(context),
        "temporary memory": needed.temporary,
        "embeddings and head": needed.master,
        "draft model": 0 if rank else draft_bytes(plan.draft, stage.device),
        "multi-token prediction": 0 if rank else unplanned_mtp_bytes(plan, context.job, blocks),
    }
    free, total = torch.cuda.mem_get_info(device)
    if sum(parts.values()) > free:
        told = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
        raise CapacityError(
            f"{context.name}: {device} has {format_bytes(free)} free of {format_bytes(total)}, "
            f"expected {format_bytes(sum(parts.values()))} ({told}); end other programs on the "
            "GPU, or plan with less memory"
        )


def accelerators(kind: DeviceKind) -> int:
    """Return how many accelerators of a kind this host has; Metal shows one."""
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    return torch.xpu.device_count() if kind == "xpu" else torch.cuda.device_count()


def kv_blocks_of(context: RankContext) -> int:
    """Return the KV blocks of a rank's stage."""
    plan, engine = context.plan, engine_limits_of(context.job, context.plan)
    slots, max_tokens = plan.slots_of(plan.stages[context.rank])
    return max(slots * blocks_of(max_tokens), 0 if engine is None else engine.num_blocks)


def state_slots_of(context: RankContext) -> int:
    """Return the states that a rank's stage keeps at the same time, saved ones among them."""
    job, plan = context.job, context.plan
    slots = state_slots(plan.slots_of(plan.stages[context.rank])[0])
    limits_of = engine_limits if job.task == "online" else policy_limits
    limits = limits_of(plan, job.engine, state_bytes=context.state_bytes)
    return max(slots, limits.num_state_slots)


def more_state_bytes(context: RankContext) -> int:
    """Return the bytes of a stage's states beyond the plan: saved ones and those after drafts."""
    stage = context.plan.stages[context.rank]
    model = load_model_dir(context.job.model_dir)
    more = state_slots_of(context) - state_slots(context.plan.slots_of(stage)[0])
    return more * model.state_bytes(stage.first_layer, stage.end_layer)


def load_runner(context: RankContext, device: torch.device) -> StageRunner:
    """Read, quantize and place the layers of a stage, and allocate its KV blocks."""
    job, plan, rank = context.job, context.plan, context.rank
    stage = plan.stages[rank]
    dtype = DTYPES[plan.dtype_of(stage)]
    is_last = rank == plan.path(stage.phase or Phase.DECODE)[-1] and job.task != "hidden"
    returns_all = reads_states(job)
    if stage.num_layers == 0:
        return StageRunner(
            layers=None,
            cache=None,
            device=device,
            is_last=is_last,
            dtype=dtype,
            returns_all=returns_all,
        )

    def report(done: int, total: int, _: str) -> None:
        context.progress.report(Event(rank=rank, kind="load", done=done, total=total))

    host = host_pool(stage)
    layers = load_stage(
        job.model_dir,
        stage.first_layer,
        stage.end_layer,
        stage.bits,
        dtype=dtype,
        device=device,
        progress=report,
        backend=job.kernel,
        weight_cache=weight_cache_of(job),
        on_disk=stage.on_disk,
        experts=stage.experts,
        host=host,
    )
    context.recorder.mark("layers")
    cache = KVCache(
        kv_shapes(layers.config, stage.first_layer, stage.end_layer),
        stage.first_layer,
        num_blocks=kv_blocks_of(context),
        num_window_blocks=window_blocks_of(plan, layers.config),
        dtype=dtype,
        device=device,
        kv_bits=plan.kv_bits_of(stage),
        states=layers.new_states(state_slots_of(context)),
    )
    channels = context.channels
    links = ((), ()) if channels is None else (channels.send_links, channels.receive_links)
    captures = job.captures and stage.computes(Phase.DECODE)
    runner = StageRunner(
        layers=layers,
        cache=cache,
        device=device,
        is_last=is_last,
        kv_connector=kv_connector(plan, cache, links, timeout_s=job.step_timeout_s),
        steps=step_runner_of(layers, cache) if captures else None,
        dtype=dtype,
        offload=offloaded_kv(context, cache, layers.config),
        returns_all=returns_all,
        host=host,
    )
    context.recorder.mark("decode steps")
    return runner


def host_pool(stage: StageAssignment) -> HostPool | None:
    """Return the threads that compute a stage's experts in the host's memory, if it has some.

    ``None``, with a logged reason, where none can: the calling thread computes them then.
    """
    if not stage.host_threads:
        return None
    try:
        return HostPool(stage.host_threads, host_cores(os.environ))
    except UnsupportedStepError as error:
        logger.warning("experts in the host's memory have no threads of their own: %s", error)
        return None


def offloaded_kv(
    context: RankContext, cache: KVCache, config: PreTrainedConfig
) -> OffloadedKV | None:
    """Return host memory and files for blocks of a stage, ``None`` without any."""
    job, plan = context.job, context.plan
    if job.task != "online":
        return None
    limits = limits_of_model(plan, job.engine, config, context.state_bytes).offload
    files = None
    if limits == NOTHING_KEPT:
        return None
    if job.engine.kv_offloading_folder is not None:
        folder = job.engine.kv_offloading_folder / f"rank-{context.rank}"
        files = BlockFiles(folder, content_digest(plan, job.model_dir, context.rank))
    return OffloadedKV(cache, limits, files)


def content_digest(plan: Plan, model_dir: Path, rank: int) -> bytes:
    """Return 32 bytes that change with what keys and values of a stage depend on, but for tokens.

    These are the plan with its number formats, the stage, and names, sizes and times of the model's
    files.
    """
    digest = hashlib.sha256(f"{rank} {plan_text(plan)}".encode())
    for path in sorted(model_dir.iterdir()) if model_dir.is_dir() else (model_dir,):
        found = path.stat()
        digest.update(repr((path.name, found.st_size, found.st_mtime_ns)).encode())
    return digest.digest()


def block_bytes(plan: Plan, config: PreTrainedConfig) -> tuple[int, int]:
    """Return the bytes of a block on all stages, and those of one of layers with windows."""
    found, has_own = [0, 0], window_of(plan, config) is not None
    for stage in plan.stages:
        dtype = DTYPES[plan.dtype_of(stage)]
        bits = plan.kv_bits_of(stage)
        for shape in kv_shapes(config, stage.first_layer, stage.end_layer):
            has_window = has_own and shape.kept_tokens is not None
            found[has_window] += KV_BLOCK_SIZE * token_bytes(shape, dtype, bits)
    return found[0], found[1]


def load_master_of(context: RankContext, device: torch.device) -> Master:
    """Load the master of a plan, whose head has the plan's bits."""
    job, plan = context.job, context.plan
    return load_master(
        job.model_dir,
        dtype=DTYPES[plan.dtype_of(plan.stages[0])],
        device=device,
        head_bits=plan.head_width,
        backend=job.kernel,
        weight_cache=weight_cache_of(job),
    )


def _load(
    context: RankContext, clock: StageClock, stack: contextlib.ExitStack
) -> tuple[StageRunner, Master | None]:
    """Load and warm up what a rank computes with: its layers, and on rank 0 the master.

    ``stack`` closes the layers' links. From now on the process keeps freed memory.
    """
    plan, rank, start_s = context.plan, context.rank, clock.now()
    device, dtype = torch_device(plan, rank), DTYPES[plan.dtype_of(plan.stages[rank])]
    check_free_memory(context, device, kv_blocks_of(context))
    if not rank and reads_states(context.job):
        MtpCheckpoint(context.job.model_dir)  # fails before anything is loaded
    master = None if rank else load_master_of(context, device)
    context.recorder.mark("embeddings and head")
    runner = load_runner(context, device)
    stack.callback(runner.close)
    clock.load_s = clock.now() - start_s
    layers = runner.layers
    clock.held = held_bytes(layers, runner.cache, master, device, runner.host)
    if (host := runner.host) is not None:
        clock.read_host = lambda: host.busy[0]
    tune_malloc_for_serving()
    trace_calls = context.recorder.trace_calls
    if layers is not None:
        features, window = message_features(layers.config), window_of(plan, layers.config)
        warm_up(plan, plan.stages[rank], runner, features, dtype, window)
        trace_calls(runner.steps or layers, "forward", "compute", device)
    if master is not None:
        warm_up_master(plan, master, runner)
        trace_calls(master, "embed", "embed", device)
        trace_calls(master, "logits", "project", device)
    context.recorder.mark("warm-up")
    return runner, master


def _capture(context: RankContext, runner: StageRunner) -> None:
    """Capture decode steps once everything else of the process has its memory."""
    reserve_bytes = context.plan.estimate.stages[context.rank].memory.temporary
    if capture_decode_steps(runner, decode_sizes(context.job, context.plan), reserve_bytes):
        context.recorder.mark("CUDA graphs")


@contextlib.contextmanager
def ring_errors(context: RankContext) -> Iterator[None]:
    """Send an error inside the context to the next rank and raise it; then close the ring."""
    communicator = context.communicator
    try:
        yield
    except Exception as error:
        found = as_llmpq_error(error, context.name)
        if communicator is not None:
            with contextlib.suppress(StageError):  # that the next rank is gone hides no error
                communicator.send(error_frame(found))
        raise found from error
    finally:
        if context.channels is not None:
            context.channels.close()


def run_stage(context: RankContext) -> None:
    """Run a stage until the master ends the run; raise an error of this or an earlier rank."""
    clock = StageClock(micro_batching=context.plan.micro_batching)
    with contextlib.ExitStack() as stack, ring_errors(context):
        assert context.communicator is not None
        communicator = RecordingCommunicator(
            context.communicator, context.recorder, clock, context.progress
        )
        runner, _ = _load(context, clock, stack)
        _capture(context, runner)
        context.progress.report(Event(rank=context.rank, kind="ready", done=1, total=1))
        StageWorker(runner=runner, communicator=communicator, clock=clock).run()


def run_master(
    context: RankContext, requests: Sequence[Request], on_finish: OnFinish
) -> Measurement:
    """Load the master, answer requests in order of arrival, and end the run.

    Raises:
        LlmpqError: what went wrong here or on any other rank.
    """
    with master_rank(context) as master:
        master.answer(requests, on_finish)
        return master.finish()


@contextlib.contextmanager
def master_rank(context: RankContext) -> Iterator[MasterRank]:
    """Load the master and wait for the other ranks; end the run when the context ends."""
    with contextlib.ExitStack() as stack, ring_errors(context):
        yield MasterRank(context, stack)


class MasterRank:
    """A loaded master: answers batches of requests, one after the other."""

    def __init__(self, context: RankContext, stack: contextlib.ExitStack) -> None:
        plan, job = context.plan, context.job
        self._context = context
        self._schedule = schedule_of(plan, job.schedule)
        self._clock = StageClock(micro_batching=plan.micro_batching)
        start_s = self._clock.now()
        self._runner, master = _load(context, self._clock, stack)
        assert master is not None
        self._master = master
        self._draft_model: Drafter | None = None
        if reads_states(job):
            self._draft_model = load_mtp_drafter(
                job, plan, master, self._runner.device, kv_blocks_of(context)
            )
        elif context.draft_link is None:
            self._draft_model = load_draft_model(job, plan, self._runner.device)
        _capture(context, self._runner)
        self._communicator: Communicator | None = None
        if context.communicator is not None:
            self._communicator = RecordingCommunicator(
                context.communicator, context.recorder, self._clock, context.progress
            )
            wait_until_ready(self._communicator)
            context.recorder.mark("other ranks")
        if context.draft_link is not None:
            self._draft_model = RemoteDraftModel(context.draft_link)
        if self._draft_model is not None:
            context.recorder.mark("draft model")
        folder = job.rendezvous.private_folder
        self._should_drain = None if folder is None else DrainFlag(folder)
        self._config = config = checked_config(plan, job.model_dir)
        self._grammars = GrammarCompiler(job.model_dir, eos_token_ids(job.model_dir, config))
        no_layers = StageRunner(layers=None, cache=None, device=self._runner.device, is_last=False)
        self._depth = PipelineDepth(
            prefill_stages=len(plan.path(Phase.PREFILL)),
            decode_stages=len(plan.path(Phase.DECODE)),
            is_split=plan.is_split,
        )
        self._executor = PipelineExecutor(
            master=self._master,
            runner=self._runner,
            communicator=self._communicator,
            clock=self._clock,
            prefill_runner=no_layers if plan.is_split else None,
            local_phases=[phase for phase in Phase if self._depth.is_local(phase)],
            returns_all=reads_states(job),
        )
        self._limits = policy_limits_of_model(plan, job.engine, config, context.state_bytes)
        self._drafts = self._limits.new_drafts()  # what they cost is known from batch to batch
        self._next_number = 0
        self._has_tokens = False
        self._made = Measurement(
            requests=0,
            generated_tokens=0,
            latency_s=0.0,
            load_s=self._clock.now() - start_s,
            stages=(),
            prefill_s=0.0,
            policy=self._schedule.policy,
        )

    def answer(
        self,
        requests: Sequence[Request],
        on_finish: OnFinish,
        on_tokens: OnTokens | None = None,
        should_abort: ShouldAbort | None = None,
    ) -> None:
        """Answer a batch of requests, in order of arrival; see :meth:`BatchRun.run`."""
        scheduler, run = self._batch_run(requests)
        made = run.run(requests, on_finish, on_tokens, self._should_drain, should_abort)
        self._next_number = scheduler.next_number
        if made.first_token_s is not None and not self._has_tokens:
            self._has_tokens = True
            self._context.recorder.mark("first token", made.first_token_s)
        total = self._made
        self._made = replace(
            total,
            requests=total.requests + made.requests,
            generated_tokens=total.generated_tokens + made.generated_tokens,
            latency_s=total.latency_s + made.elapsed_s,
            prefill_s=(total.prefill_s or 0.0) + made.prefill_s,
            records=made.records,
            adjusted=made.adjusted,
            cached_tokens=total.cached_tokens + made.cached_tokens,
            draft_tokens=total.draft_tokens + made.draft_tokens,
            accepted_tokens=total.accepted_tokens + made.accepted_tokens,
            not_served=total.not_served + len(requests) - made.requests,
        )

    def serve_online(self, channel: EngineChannel) -> None:
        """Serve the requests of a channel until its other end is closed.

        Raises:
            LlmpqError: what went wrong here or on any other rank.
        """
        plan, job, config = self._context.plan, self._context.job, self._config
        offload, vocab_size = self._runner.offload, config.get_text_config().vocab_size
        predictor = job.engine.predictor
        OnlineRun(
            channel=channel,
            executor=self._executor,
            limits=limits_of_model(plan, job.engine, config, self._context.state_bytes),
            order=queue_order(job.engine.scheduler, alpha=job.engine.alpha),
            model=ModelLimits(
                max_model_len=max_context_of(job, plan),
                vocab_size=vocab_size,
                eos_token_ids=eos_token_ids(job.model_dir, config),
                max_tokens=plan.workload.new_tokens,
            ),
            grammars=self._grammars,
            speculative=job.engine.speculative_config,
            draft_model=self._draft_model,
            predictor=None if predictor is None else LearnedPredictor(predictor, vocab_size),
            block_bytes=block_bytes(plan, config),
            stored=() if offload is None else offload.stored(),
        ).run(self._context.recorder.start.seconds)

    def check_stages(self) -> None:
        """Raise the error of another rank that failed between two batches."""
        if self._communicator is not None and self._communicator.has_frame():
            raise error_from_frame(self._communicator.recv())

    def finish(self) -> Measurement:
        """End the other ranks and return the measurement of all batches.

        The requests' records are those of the last batch.

        Raises:
            StageError: the launcher was killed, which closes its end of a channel as an orderly end
                does. Ranks of other hosts are to wait for another one.
        """
        launcher = self._context.job.launcher_pid
        if launcher and is_ending(launcher):
            raise StageError(f"{self._context.name}: the process that started it has ended")
        stages = [self._clock.stats(0, self._runner.device)]
        if self._communicator is not None:
            stages += shut_down(self._communicator)
        start = tuple(self._context.recorder.start.steps)
        draft = None if self._draft_model is None else self._draft_model.finish()
        return replace(self._made, stages=tuple(stages), start=start, draft=draft)

    def _batch_run(self, requests: Sequence[Request]) -> tuple[PolicyScheduler, BatchRun]:
        context, plan = self._context, self._context.plan
        job = context.job
        policy = make_policy(self._schedule, PipelineShape.of(plan))
        monitor = drift_monitor(self._schedule, policy, replans=job.replans, lengths=job.lengths)
        scheduler = PolicyScheduler(
            policy,
            self._limits,
            self._depth,
            part_tokens=None if plan.is_split else plan.workload.max_prompt_tokens,
            # As many rows as the plan's frames and its head's memory are for.
            scored_tokens=max(plan.micro_batching.prefill, plan.micro_batching.decode),
            drafts=self._drafts,
            monitor=monitor,
            first_number=self._next_number,
        )
        run = BatchRun(
            executor=self._executor,
            scheduler=scheduler,
            limits=self._limits,
            clock=self._clock,
            monitor=monitor,
            grammars=self._grammars,
            lookup=context.job.engine.speculative_config,
            draft_model=self._draft_model,
            predictor=predictor_of(
                job.prediction, requests, self._config.get_text_config().vocab_size
            ),
            progress=context.progress,
        )
        context.recorder.trace_calls(run.engine, "sample", "sample", self._runner.device)
        return scheduler, run
