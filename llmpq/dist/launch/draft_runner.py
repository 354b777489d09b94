"""Loads the draft model of speculative decoding beside the master's own stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from llmpq.batching.draft_model import FEW_TOKENS, DraftWork
from llmpq.dist.engine.compiled_steps import decode_steps_of
from llmpq.dist.engine.draft_model import DraftModel
from llmpq.dist.engine.packed_steps import PipelineSteps
from llmpq.dist.engine.policy import engine_limits
from llmpq.dist.engine.stage import StageRunner
from llmpq.dist.io.job import Job
from llmpq.dist.kv.cache import KVCache
from llmpq.models import kv_shapes
from llmpq.quant.loading.loader import load_master, load_stage
from llmpq.quant.loading.weight_cache import WeightCache
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.plan import Plan
from llmpq.spec.runtime_constants import KV_BLOCK_SIZE
from llmpq.spec.schedule import DRAFT_HEAD_BITS

WARM_UP = (FEW_TOKENS + 2, 2)
"""Tokens and draft tokens of the first call: a prompt, and a step of few rows."""


def weight_cache_of(job: Job) -> WeightCache | None:
    """Return the cache of a run's quantized weights, ``None`` without one."""
    return None if job.store is None else WeightCache.opened(job.store, job.store_limit_bytes)


def load_draft_model(
    job: Job, plan: Plan, dtype: torch.dtype, torch_device: Callable[[int | None], torch.device]
) -> DraftModel | None:
    """Load the draft model of a run and warm it up; return ``None`` where there is none.

    Args:
        job: of the run.
        plan: its strategy.
        dtype: of what is not quantized.
        torch_device: makes the device of an index in the cluster the current one and returns it;
            of ``None`` that of the master, which is the current one again in the end.

    Raises:
        SpecError: as ``load_stage`` and ``load_master``.
    """
    config, limits = job.engine.speculative_config, engine_limits(plan, job.engine)
    if limits.draft is None or config is None or config.model is None:
        return None
    model_dir, spec = Path(config.model), load_model_dir(config.model)
    store = weight_cache_of(job)
    device = torch_device(None if plan.draft is None else plan.draft.device)
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
        graphs=decode_steps_of(layers, cache, 1) if job.captures else None,
        dtype=dtype,
    )
    model = DraftModel(
        PipelineSteps(master=master, runner=runner, communicator=None),
        device=device,
        block_size=KV_BLOCK_SIZE,
        token_budget=limits.token_budget,
    )
    tokens, count = WARM_UP
    torch_device(None)
    model.propose([DraftWork(0, 0, tokens, count, (0,))], [[0] * tokens])
    return model
