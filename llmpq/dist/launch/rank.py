"""One rank of a run: what a plan makes of it, and the two roles it can have.

The same two functions serve processes (``llmpq.dist.launch.worker``) and, in tests, threads: only
the communicator differs.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from llmpq.batching import PipelineDepth
from llmpq.batching.length import ORACLE, Prediction
from llmpq.dist.engine.cuda_graphs import graphs_of
from llmpq.dist.engine.engine import (
    MasterEngine,
    OnFinish,
    OnTokens,
    ShouldAbort,
    ShouldDrain,
)
from llmpq.dist.engine.policy import policy_of, schedule_of
from llmpq.dist.engine.sampler import Sampler
from llmpq.dist.engine.stage import StageRunner, StageWorker
from llmpq.dist.engine.warmup import warm_up, warm_up_master
from llmpq.dist.io.job import TOLD_ONLY, DriftHandling, check_plan
from llmpq.dist.io.prompts import Request
from llmpq.dist.io.results import FinishReason
from llmpq.dist.io.sampling_params import SamplingParams
from llmpq.dist.kv.cache import KVCache
from llmpq.dist.kv.storage import token_bytes
from llmpq.dist.kv.transfer import KVReceiveLink, KVSendLink, kv_connector
from llmpq.dist.launch.process_environment import tune_malloc_for_serving
from llmpq.dist.metrics.measurement import HeldBytes, Measurement
from llmpq.dist.metrics.progress import Event, RunProgress, TokenCounter
from llmpq.dist.metrics.recorder import Recorder, RecordingCommunicator
from llmpq.dist.metrics.report import length_monitor_for
from llmpq.dist.metrics.stats import StageClock, peak_memory_bytes
from llmpq.dist.transport.communicator import Communicator
from llmpq.dist.transport.control_messages import (
    as_llmpq_error,
    error_frame,
    error_from_frame,
    shut_down,
    wait_until_ready,
)
from llmpq.dist.transport.errors import stage_name
from llmpq.dist.transport.frames import FrameLimits
from llmpq.errors import LlmpqError, SpecError, StageError
from llmpq.models import Master, kv_shapes, load_config
from llmpq.quant.loading.loader import load_master, load_stage
from llmpq.quant.loading.weight_cache import WeightCache
from llmpq.quant.modules.layer import stored_bytes
from llmpq.spec.catalog import device as device_spec
from llmpq.spec.plan import Plan, StageAssignment, plan_text
from llmpq.spec.precision import Phase
from llmpq.spec.schedule import Schedule

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """What one rank needs to play its role.

    Attributes:
        plan: the strategy.
        rank: which of its stages this is.
        model_dir: where the weights are.
        communicator: the ring, ``None`` when there is only one stage.
        send_links, receive_links: its ends of the links for keys and values of a split plan (WAA).
        step_timeout_s: how long those links may be silent while somebody waits.
        progress: takes events.
        keeps_all_tokens: whether the last stage hands on every token of a row, not its last alone.
        store, kernel: layers quantized by earlier runs; backend to prefer, ``None`` for any.
        captures: whether decode steps may become CUDA graphs.
        recorder: keeps what this rank did when.
        schedule: the batching policy to obey; ``None`` is the plan's own.
        prediction: answer lengths as policies see them.
        drift: what is done when answers are not those that the schedule was made for.
        should_drain: returns True once the master should admit no new requests.
    """

    plan: Plan
    rank: int
    model_dir: Path
    communicator: Communicator | None
    progress: RunProgress
    keeps_all_tokens: bool = False
    store: WeightCache | None = None
    kernel: str | None = None
    captures: bool = True
    recorder: Recorder | None = None
    schedule: Schedule | None = None
    prediction: Prediction = ORACLE
    drift: DriftHandling = TOLD_ONLY
    should_drain: ShouldDrain | None = None
    send_links: Sequence[KVSendLink] = ()
    receive_links: Sequence[KVReceiveLink] = ()
    step_timeout_s: float = 10.0

    def recorded(self, clock: StageClock) -> Communicator | None:
        """Return the communicator, with its waits added up in ``clock``."""
        if self.communicator is None:
            return None
        recorder = self.recorder or Recorder(self.rank, is_on=False)
        return RecordingCommunicator(self.communicator, recorder, clock, self.progress)

    @property
    def name(self) -> str:
        """What messages call this rank."""
        if self.communicator is not None:
            return self.communicator.names[self.rank]
        return stage_name(self.plan, self.rank)


def checked_config(plan: Plan, model_dir: Path) -> PreTrainedConfig:
    """Read the model's configuration and make sure that the plan is for it.

    Raises:
        SpecError: what ``load_config`` and ``check_plan`` refuse.
    """
    config = load_config(model_dir)
    check_plan(plan, model_dir, config.num_hidden_layers)
    return config


def frame_limits(plan: Plan, model_dir: Path, config: PreTrainedConfig) -> FrameLimits:
    """Return what frames of this run may be; equal on all ranks of equal plans and models."""
    digest = hashlib.sha256(plan_text(plan).encode())
    digest.update((model_dir / "config.json").read_bytes())
    return FrameLimits(
        digest=digest.digest()[:8],
        num_slots=plan.workload.batch,
        max_context=plan.workload.max_context_tokens,
        prefill_rows=plan.micro_batching.prefill,
        prefill_tokens=plan.workload.prompt_tokens,
        decode_rows=plan.micro_batching.decode,
        hidden_size=config.hidden_size,
        dtype=DTYPES[plan.dtype],
        kv_token_bytes=_kv_token_bytes(plan, config),
    )


def _kv_token_bytes(plan: Plan, config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the bytes of a token's keys and values in every layer; none where they stay."""
    if not plan.is_split:
        return ()
    shapes = kv_shapes(config, 0, plan.model.num_layers)
    return tuple(token_bytes(shape, DTYPES[plan.dtype], plan.kv_bits) for shape in shapes)


def torch_device(plan: Plan, rank: int) -> torch.device:
    """Return the device of a rank: the CPU, or its node's n-th accelerator.

    Raises:
        SpecError: the plan asks for an accelerator this host does not have.
    """
    own = plan.stages[rank].device
    devices = plan.cluster.devices
    if device_spec(devices[own].type).kind == "cpu":
        return torch.device("cpu")
    before = [
        other
        for other in devices[:own]
        if other.node == devices[own].node and device_spec(other.type).kind == "cuda"
    ]
    if len(before) >= torch.cuda.device_count():
        raise SpecError(
            f"{stage_name(plan, rank)}: found {torch.cuda.device_count()} CUDA devices on this "
            f"host, expected at least {len(before) + 1}"
        )
    return torch.device("cuda", len(before))


def use_device(plan: Plan, rank: int) -> torch.device:
    """Return the device of a rank, made this thread's current one: Triton launches on that."""
    device = torch_device(plan, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def load_runner(context: RankContext, device: torch.device) -> StageRunner:
    """Read, quantize and place the layers of a stage, and take the memory of its KV slots."""
    plan, rank = context.plan, context.rank
    stage = plan.stages[rank]
    way = plan.path(stage.phase or Phase.DECODE)
    is_last = rank == way[-1] and not context.keeps_all_tokens
    if stage.num_layers == 0:
        return _no_layers(device, is_last=is_last)

    def report(done: int, total: int, _: str) -> None:
        context.progress.report(Event(rank=rank, kind="load", done=done, total=total))

    layers = load_stage(
        context.model_dir,
        stage.first_layer,
        stage.end_layer,
        stage.bits,
        dtype=DTYPES[plan.dtype],
        device=device,
        progress=report,
        backend=context.kernel,
        weight_cache=context.store,
    )
    num_slots, max_tokens = plan.slots_of(stage)
    cache = KVCache(
        kv_shapes(layers.config, stage.first_layer, stage.end_layer),
        stage.first_layer,
        num_slots=num_slots,
        max_tokens=max_tokens,
        dtype=DTYPES[plan.dtype],
        device=device,
        kv_bits=plan.kv_bits,
        read_tokens=_most_tokens_read(plan, stage),
    )
    connector = kv_connector(
        plan, cache, (context.send_links, context.receive_links), timeout_s=context.step_timeout_s
    )
    captures = context.captures and stage.computes(Phase.DECODE)
    graphs = graphs_of(layers, cache, plan.micro_batching.decode) if captures else None
    return StageRunner(
        layers=layers,
        cache=cache,
        device=device,
        is_last=is_last,
        kv_connector=connector,
        graphs=graphs,
    )


def _no_layers(device: torch.device, *, is_last: bool = False) -> StageRunner:
    return StageRunner(layers=None, cache=None, device=device, is_last=is_last)


def _most_tokens_read(plan: Plan, stage: StageAssignment) -> int:
    """Return the most cached tokens, of all its rows, that a micro-batch attends to."""
    sizes, workload = plan.micro_batching, plan.workload
    prefill = sizes.prefill * workload.prompt_tokens if stage.computes(Phase.PREFILL) else 0
    decode = sizes.decode * workload.max_context_tokens if stage.computes(Phase.DECODE) else 0
    return max(prefill, decode)


def held_bytes(runner: StageRunner, master: Master | None) -> HeldBytes:
    """Count what a loaded rank holds; its peak so far is that of loading."""
    layers, cache = runner.layers, runner.cache
    return HeldBytes(
        weights=0 if layers is None else stored_bytes(layers.layers),
        master=0 if master is None else stored_bytes(master),
        kv=0 if cache is None else cache.nbytes,
        buffers=0 if cache is None else cache.buffer_bytes,
        load_peak=peak_memory_bytes(runner.device),
    )


def run_stage(context: RankContext) -> None:
    """Play the role of a stage until the master ends the run.

    Raises:
        LlmpqError: what went wrong here or before this rank; the ranks further on know it too.
    """
    clock = StageClock(micro_batching=context.plan.micro_batching)
    communicator = context.recorded(clock)
    assert communicator is not None
    runner: StageRunner | None = None
    try:
        start = clock.now()
        runner = load_runner(context, use_device(context.plan, context.rank))
        clock.load_s = clock.now() - start
        clock.held = held_bytes(runner, None)
        _warm_up_layers(context, runner)
        _watch(context, runner)
        StageWorker(runner=runner, communicator=communicator, clock=clock).run()
    except Exception as error:
        found = as_llmpq_error(error, context.name)
        send_error(communicator, found)
        raise found from error
    finally:
        communicator.close()
        if runner is not None:
            runner.close()


def _watch(context: RankContext, runner: StageRunner) -> None:
    if context.recorder is not None and runner.layers is not None:
        computes = runner.graphs or runner.layers
        context.recorder.trace_calls(computes, "forward", "compute", runner.device)


def _warm_up_layers(context: RankContext, runner: StageRunner) -> None:
    """Run the layers once; from then on, keep freed memory."""
    plan, stage = context.plan, context.plan.stages[context.rank]
    tune_malloc_for_serving()
    if runner.layers is not None:
        warm_up(plan, stage, runner, runner.layers.config.hidden_size, DTYPES[plan.dtype])


def send_error(communicator: Communicator, error: LlmpqError) -> None:
    """Send the reason for the end on; that the next rank is gone too must not hide it."""
    with contextlib.suppress(StageError):
        communicator.send(error_frame(error))


def run_master(
    context: RankContext, requests: Sequence[Request], sampling: SamplingParams, on_finish: OnFinish
) -> Measurement:
    """Play the role of the master: load, answer every request, end the run.

    Args:
        context: of rank 0.
        requests: in order of arrival; may be none, when all were answered before.
        sampling: how tokens are chosen.
        on_finish: called once for each request.

    Raises:
        LlmpqError: what went wrong here or on any other rank.
    """
    with master_rank(context) as master:
        master.answer(requests, sampling, on_finish)
        return master.finish()


@contextlib.contextmanager
def master_rank(context: RankContext) -> Iterator[MasterRank]:
    """Load the master and wait for the other ranks; end the run when the context ends.

    An error inside the context is sent to the other ranks.

    Raises:
        LlmpqError: what went wrong here or on any other rank.
    """
    try:
        master = MasterRank(context)
        with contextlib.closing(master.runner):
            yield master
    except Exception as error:
        found = as_llmpq_error(error, context.name)
        if context.communicator is not None:
            send_error(context.communicator, found)
        raise found from error
    finally:
        if context.communicator is not None:
            context.communicator.close()


class MasterRank:
    """A loaded master: answers batches of requests, one after the other.

    Args:
        context: of rank 0.

    Attributes:
        runner: the layers of its own stage.
    """

    def __init__(self, context: RankContext) -> None:
        plan = context.plan
        self._context = context
        self._schedule = schedule_of(plan, context.schedule)
        self._clock = StageClock(micro_batching=plan.micro_batching)
        self._device = use_device(plan, 0)
        start = self._clock.now()
        self._master = load_master(context.model_dir, dtype=DTYPES[plan.dtype], device=self._device)
        runner = self.runner = load_runner(context, self._device)
        self._clock.load_s = self._clock.now() - start
        self._clock.held = held_bytes(runner, self._master)
        _warm_up_layers(context, runner)
        warm_up_master(plan, self._master, runner)
        self._communicator = context.recorded(self._clock)
        if self._communicator is not None:
            wait_until_ready(self._communicator)
        self._watch_master()
        self._load_s = self._clock.now() - start
        self._next_number = 0
        self._made = Measurement(
            requests=0,
            generated_tokens=0,
            latency_s=0.0,
            load_s=self._load_s,
            stages=(),
            prefill_s=0.0,
            policy=self._schedule.policy,
        )

    def answer(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        on_finish: OnFinish,
        on_tokens: OnTokens | None = None,
        should_abort: ShouldAbort | None = None,
    ) -> None:
        """Answer a batch of requests.

        Args:
            requests: in order of arrival.
            sampling: how tokens are chosen.
            on_finish: called once for each request.
            on_tokens: called after each step with its new tokens.
            should_abort: returns True once the batch should end early.

        Raises:
            LlmpqError: what went wrong here or on any other rank.
        """
        expected = sum(request.max_new_tokens for request in requests)
        progress = TokenCounter(self._context.progress, expected)  # says that serving begins

        def finish(request: Request, token_ids: tuple[int, ...], reason: FinishReason) -> None:
            progress.expect_fewer(request.max_new_tokens - len(token_ids))
            on_finish(request, token_ids, reason)

        def count(tokens: Sequence[tuple[Request, int]]) -> None:
            progress.add(len(tokens))
            if on_tokens is not None:
                on_tokens(tokens)

        engine = self._engine(requests, sampling)
        made = engine.run(requests, finish, count, self._context.should_drain, should_abort)
        self._next_number = engine.next_number
        progress.report()
        total = self._made
        self._made = replace(
            total,
            requests=total.requests + made.requests,
            generated_tokens=total.generated_tokens + made.generated_tokens,
            latency_s=total.latency_s + made.elapsed_s,
            prefill_s=(total.prefill_s or 0.0) + made.prefill_s,
            records=made.records,
            adjusted=made.adjusted,
            not_served=total.not_served + len(requests) - made.requests,
        )

    def check_stages(self) -> None:
        """Look whether the other ranks still work, between two batches.

        Raises:
            LlmpqError: why one of them does not.
        """
        if self._communicator is not None and self._communicator.has_frame():
            raise error_from_frame(self._communicator.recv())

    def finish(self) -> Measurement:
        """End the other ranks and return the measurement of all batches.

        The requests' records are those of the last batch.
        """
        stages = [self._clock.stats(0, self._device)]
        if self._communicator is not None:
            stages += shut_down(self._communicator)
        return replace(self._made, stages=tuple(stages))

    def _engine(self, requests: Sequence[Request], sampling: SamplingParams) -> MasterEngine:
        plan = self._context.plan
        policy = policy_of(plan, self._schedule, self._context.prediction, requests)
        depth = PipelineDepth(
            prefill_stages=len(plan.path(Phase.PREFILL)),
            decode_stages=len(plan.path(Phase.DECODE)),
            is_split=plan.is_split,
        )
        sampler = Sampler(sampling)
        if self._context.recorder is not None:
            self._context.recorder.trace_calls(sampler, "sample", "sample", self._device)
        return MasterEngine(
            master=self._master,
            runner=self.runner,
            communicator=self._communicator,
            policy=policy,
            sampler=sampler,
            clock=self._clock,
            num_slots=plan.workload.batch,
            depth=depth,
            prefill_runner=_no_layers(self._device) if plan.is_split else None,
            monitor=length_monitor_for(self._schedule, policy, self._context.drift),
            first_number=self._next_number,
        )

    def _watch_master(self) -> None:
        recorder = self._context.recorder
        if recorder is None:
            return
        recorder.trace_calls(self._master, "embed", "embed", self._device)
        _watch(self._context, self.runner)
        recorder.trace_calls(self._master, "logits", "project", self._device)
