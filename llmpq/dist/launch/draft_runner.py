"""Loads the draft model of speculative decoding, on the device of rank 0 or on one of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from llmpq.batching.engine_step import FEW_TOKENS, DraftWork
from llmpq.batching.speculation import MAX_STEP_TOKENS
from llmpq.dist.engine.compiled_steps import step_runner_of
from llmpq.dist.engine.cuda_graphs import DecodeSizes
from llmpq.dist.engine.drafters import DraftModel, DraftWorker
from llmpq.dist.engine.executor import PipelineExecutor, StageRunner, capture_decode_steps
from llmpq.dist.engine.mtp import MtpDrafter
from llmpq.dist.io.job import Job
from llmpq.dist.kv.cache import KVCache
from llmpq.dist.launch.process_environment import tune_malloc_for_serving
from llmpq.dist.metrics.measurement import HeldBytes
from llmpq.dist.metrics.progress import Event, RunProgress
from llmpq.dist.metrics.stats import StageClock, peak_memory_bytes
from llmpq.dist.transport.communicator import Communicator
from llmpq.kernels.cpu.experts import HostPool
from llmpq.models import DecoderStage, Master, kv_shapes
from llmpq.options.limits import engine_limits, mtp_bits, mtp_bytes
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.loading.master import load_master
from llmpq.quant.loading.mtp import load_mtp
from llmpq.quant.loading.weight_cache import WeightCache
from llmpq.quant.modules.experts import host_expert_bytes
from llmpq.quant.modules.layer import stored_bytes
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.plan import DRAFT_HEAD_BITS, MTP, Plan
from llmpq.spec.runtime_constants import KV_BLOCK_SIZE

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
WARM_UP = (FEW_TOKENS + 2, 2)
"""Tokens and draft tokens of the first call: a prompt, and a step of few rows."""


def weight_cache_of(job: Job) -> WeightCache | None:
    """Return the cache of a run's quantized weights, ``None`` without one."""
    return None if job.store is None else WeightCache.opened(job.store, job.store_limit_bytes)


def held_bytes(
    layers: DecoderStage | None,
    cache: KVCache | None,
    master: Master | None,
    device: torch.device,
    host: HostPool | None = None,
) -> HeldBytes:
    """Return the bytes of what a rank has loaded; weights on disk count with their buffers."""
    apart = 0 if layers is None else host_expert_bytes(layers.layers)
    weights = 0 if layers is None else stored_bytes(layers.layers) - apart
    if layers is not None and layers.streamed is not None:
        weights += layers.streamed.buffer_bytes - layers.streamed.nbytes
    return HeldBytes(
        weights=weights,
        master=0 if master is None else stored_bytes(master),
        kv=0 if cache is None else cache.nbytes,
        buffers=0 if cache is None else cache.buffer_bytes,
        load_peak=peak_memory_bytes(device),
        host=apart + (0 if host is None else host.buffer_bytes),
    )


def has_draft_rank(job: Job, plan: Plan) -> bool:
    """Whether a rank of its own runs the draft model of a run."""
    config = job.engine.speculative_config
    has_model = config is not None and config.model is not None
    answers = job.task in ("generate", "serve", "online")
    return plan.draft_rank is not None and has_model and answers


def reads_states(job: Job) -> bool:
    """Whether a run's drafts are of the model's layer for multi-token prediction."""
    config = job.engine.speculative_config
    is_mtp = config is not None and config.method == "mtp"
    return is_mtp and job.task in ("generate", "serve", "online")


def unplanned_mtp_bytes(plan: Plan, job: Job, num_blocks: int) -> int:
    """Return the bytes of a layer for multi-token prediction that the plan does not count."""
    config = job.engine.speculative_config
    is_planned = plan.draft is not None and plan.draft.model == MTP
    if config is None or is_planned or not reads_states(job):
        return 0
    weights, block = mtp_bytes(plan, config, load_model_dir(job.model_dir))
    return weights + num_blocks * block


def load_mtp_drafter(
    job: Job, plan: Plan, master: Master, device: torch.device, num_blocks: int
) -> MtpDrafter:
    """Load the model's layer for multi-token prediction and warm it up.

    Args:
        job: of the run.
        plan: its strategy; what is not quantized has the number format of stage 0.
        master: of the model.
        device: of the master; the current one.
        num_blocks: KV blocks of a stage of the model.

    Raises:
        SpecError: as ``load_mtp``.
    """
    config = job.engine.speculative_config
    assert config is not None
    dtype = DTYPES[plan.dtype_of(plan.stages[0])]
    layer, ends = load_mtp(
        job.model_dir,
        mtp_bits(plan, config),
        dtype=dtype,
        device=device,
        backend=job.kernel,
        weight_cache=weight_cache_of(job),
    )
    cache = KVCache(
        kv_shapes(layer.config, layer.first_layer, layer.end_layer),
        layer.first_layer,
        num_blocks=num_blocks,
        dtype=dtype,
        device=device,
    )
    runner = StageRunner(
        layers=layer,
        cache=cache,
        device=device,
        is_last=False,
        steps=step_runner_of(layer, cache) if job.captures else None,
        dtype=dtype,
    )
    held = held_bytes(layer, cache, None, device)
    drafter = MtpDrafter(
        master=master,
        ends=ends,
        runner=runner,
        block_size=KV_BLOCK_SIZE,
        held=replace(held, weights=held.weights + stored_bytes(ends)),
    )
    tokens, count = WARM_UP
    states = torch.zeros(tokens - 1, layer.config.hidden_size, dtype=dtype, device=device)
    drafter.observe(0, 0, states, [0] * tokens, (0,))
    drafter.propose([DraftWork(0, tokens - 1, tokens, count, (0,))], [[0] * tokens])
    drafter.clear()
    most = min(plan.workload.max_context_tokens, cache.num_tokens)
    sizes = DecodeSizes(rows=MAX_STEP_TOKENS, most_tokens=most)
    capture_decode_steps(runner, sizes, plan.estimate.stages[0].memory.temporary)
    return drafter


def load_draft_model(job: Job, plan: Plan, device: torch.device) -> DraftModel | None:
    """Load the draft model of a run and warm it up; return ``None`` where there is none.

    Args:
        job: of the run.
        plan: its strategy; what is not quantized has the number format of stage 0.
        device: where it runs; the current one.

    Raises:
        SpecError: as ``load_stage`` and ``load_master``.
    """
    config, limits = job.engine.speculative_config, engine_limits(plan, job.engine)
    if limits.draft is None or config is None or config.model is None:
        return None
    model_dir, spec = Path(config.model), load_model_dir(config.model)
    dtype = DTYPES[plan.dtype_of(plan.stages[0])]
    store = weight_cache_of(job)
    is_rounded = config.bits is not None and config.bits < 16
    master = load_master(
        model_dir,
        dtype=dtype,
        device=device,
        head_bits=DRAFT_HEAD_BITS if is_rounded and spec.stored_head is None else None,
        backend=job.kernel,
        weight_cache=store,
    )
    layers = load_stage(
        model_dir,
        0,
        spec.num_layers,
        None if config.bits is None else [config.bits] * spec.num_layers,
        dtype=dtype,
        device=device,
        backend=job.kernel,
        weight_cache=store,
    )
    shapes = kv_shapes(layers.config, 0, spec.num_layers)
    cache = KVCache(shapes, 0, num_blocks=limits.draft.num_blocks, dtype=dtype, device=device)
    runner = StageRunner(
        layers=layers,
        cache=cache,
        device=device,
        is_last=True,
        steps=step_runner_of(layers, cache) if job.captures else None,
        dtype=dtype,
    )
    model = DraftModel(
        PipelineExecutor(master=master, runner=runner, communicator=None),
        block_size=KV_BLOCK_SIZE,
        token_budget=limits.token_budget,
        held=held_bytes(layers, cache, master, device),
    )
    tokens, count = WARM_UP
    model.propose([DraftWork(0, 0, tokens, count, (0,))], [[0] * tokens])
    most = min(limits.draft.max_tokens or plan.workload.max_context_tokens, cache.num_tokens)
    sizes = DecodeSizes(rows=limits.max_sequences, most_tokens=most)
    shared = limits.draft.stage
    reserve_bytes = 0 if shared is None else plan.estimate.stages[shared].memory.temporary
    capture_decode_steps(runner, sizes, reserve_bytes)
    return model


def run_draft_model(
    job: Job,
    plan: Plan,
    device: torch.device,
    communicator: Communicator,
    progress: RunProgress,
) -> None:
    """Run the draft model on a device of its own until the master ends the run.

    Args:
        job: of the run, with a draft model.
        plan: its strategy.
        device: where it runs; the current one.
        communicator: the ring with the master.
        progress: receives ``ready`` once the model is loaded.

    Raises:
        LlmpqError: as :func:`load_draft_model`; or the master is gone.
    """
    clock = StageClock(micro_batching=plan.micro_batching)
    start_s = clock.now()
    model = load_draft_model(job, plan, device)
    assert model is not None
    clock.load_s, clock.held = clock.now() - start_s, model.held
    tune_malloc_for_serving()
    progress.report(Event(rank=communicator.rank, kind="ready", done=1, total=1))
    DraftWorker(model=model, communicator=communicator, clock=clock, device=device).run()
